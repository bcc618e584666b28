#include "data/dataset.h"

#include <algorithm>
#include <map>
#include <set>

#include "common/config/config.h"
#include "common/hash.h"
#include "common/rng.h"
#include "data/testing.h"

namespace muster {
namespace {

using testing::HasSubstr;

constexpr int32_t kEnd = 256;

struct Packed {
  std::vector<int32_t> tokens, targets, positions, cu_seqlens;
  std::vector<int64_t> ids;
  int64_t max_segment = 0;
  int64_t target_tokens = 0;
  bool operator==(const Packed&) const = default;
};

// The contract of dataset.h and batch.h, said as slowly and plainly as possible.
Packed reference(const std::vector<std::string>& documents, const std::vector<int64_t>& ids,
                 int64_t length, bool separate) {
  std::vector<int32_t> stream;
  for (const std::string& document : documents) {
    for (const char c : document) stream.push_back(static_cast<unsigned char>(c));
    stream.push_back(kEnd);
  }
  Packed packed;
  packed.ids = ids;
  for (const int64_t id : ids) {
    for (int64_t i = 0; i < length; ++i) {
      const auto at = static_cast<size_t>(id * length + i);
      const int32_t token = stream[at];
      const bool begins = i == 0 || (separate && stream[at - 1] == kEnd);
      if (begins) packed.cu_seqlens.push_back(static_cast<int32_t>(packed.tokens.size()));
      packed.tokens.push_back(token);
      packed.positions.push_back(begins ? 0 : packed.positions.back() + 1);
      packed.targets.push_back(separate && token == kEnd ? kIgnoredTarget : stream[at + 1]);
    }
  }
  packed.cu_seqlens.push_back(static_cast<int32_t>(packed.tokens.size()));
  for (size_t i = 0; i + 1 < packed.cu_seqlens.size(); ++i) {
    packed.max_segment =
        std::max<int64_t>(packed.max_segment, packed.cu_seqlens[i + 1] - packed.cu_seqlens[i]);
  }
  packed.target_tokens =
      std::count_if(packed.targets.begin(), packed.targets.end(), [](int32_t t) { return t >= 0; });
  return packed;
}

Packed pack(Dataset& dataset, Split split, const std::vector<int64_t>& ids) {
  const SlotLayout layout(static_cast<int64_t>(ids.size()) + 1, dataset.options().sequence_length);
  std::vector<char> memory(static_cast<size_t>(layout.bytes()) + 64, 0x77);
  char* slot = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  dataset.pack(split, ids, 5, layout, slot);
  const Batch batch = layout.batch(slot, 5);
  const auto vector = [](const ConstTensorView& view) {
    return std::vector<int32_t>(view.data<int32_t>(), view.data<int32_t>() + view.numel());
  };
  return {vector(batch.tokens),
          vector(batch.targets),
          vector(batch.positions),
          vector(batch.cu_seqlens),
          {batch.ids.begin(), batch.ids.end()},
          batch.max_segment,
          batch.target_tokens};
}

class DatasetTest : public testing::Test {
 protected:
  DatasetTest() {
    options_.sources = {corpus_.path()};
    options_.cache_dir = cache_.path();
    options_.held_out = 0;
    options_.sequence_length = 16;
    options_.threads = 2;
  }
  // Documents of all sorts of lengths in all sorts of files, in the order of the files' names.
  std::vector<std::string> add_documents(int count, size_t longest = 60) {
    std::vector<std::string> documents;
    for (int i = 0; i < count; ++i) {
      const auto seed = static_cast<uint32_t>(i);
      std::string text = some_text(1 + (seed * 37 + 11) % longest, seed);
      const std::string name = "d" + std::to_string(1000 + i);
      if (i % 4 == 0) corpus_.add(name + ".txt", text);
      if (i % 4 == 1) corpus_.add(name + ".rst.gz", gzipped(text));
      if (i % 4 == 2) corpus_.add(name + ".md.zst", zstd_compressed(text));
      if (i % 4 == 3) {
        std::replace(text.begin(), text.end(), '\n', ' ');
        const std::string line = "{\"text\":\"" + text + "\"}\n";
        corpus_.add(name + ".jsonl", line + line);
        documents.push_back(text);
      }
      documents.push_back(text);
    }
    return documents;
  }
  std::string error() {
    return error_of<DataError>([this] { Dataset dataset(options_); });
  }

  Corpus corpus_;
  Corpus cache_;
  DatasetOptions options_;
};

TEST_F(DatasetTest, PacksWhatTheReferencePacks) {
  const auto documents = add_documents(60);
  for (const bool separate : {true, false}) {
    for (const int64_t length : {1, 2, 16, 61, 500}) {
      options_.separate_documents = separate;
      options_.sequence_length = length;
      Dataset dataset(options_);
      const int64_t samples = dataset.samples(Split::kTrain);
      ASSERT_GE(samples, 3);
      std::vector<int64_t> ids;
      for (int64_t id = 0; id < samples; ++id) ids.push_back(id);
      EXPECT_EQ(pack(dataset, Split::kTrain, ids), reference(documents, ids, length, separate));
      ids = {samples - 1, 0, samples / 2, 0};  // any order, any subset
      EXPECT_EQ(pack(dataset, Split::kTrain, ids), reference(documents, ids, length, separate));
    }
  }
}

TEST_F(DatasetTest, PacksTheSameThroughATinyCache) {
  const auto documents = add_documents(40, 3000);
  options_.cache_bytes = 4000;  // many files are larger than the share that may lie in memory
  options_.sequence_length = 100;
  Dataset dataset(options_);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 60; ++i) ids.push_back(i * 7919 % dataset.samples(Split::kTrain));
  EXPECT_EQ(pack(dataset, Split::kTrain, ids), reference(documents, ids, 100, true));
  EXPECT_LE(dataset.cache().bytes(), 4000);
}

TEST_F(DatasetTest, EachTokenIsAnInputOnceAndTheTailIsDropped) {
  const auto documents = add_documents(30);
  Dataset dataset(options_);
  const int64_t samples = dataset.samples(Split::kTrain);
  EXPECT_EQ(samples, (dataset.tokens() - 1) / 16);
  std::string inputs;
  for (int64_t id = 0; id < samples; ++id) {
    for (const int32_t token : pack(dataset, Split::kTrain, {id}).tokens) {
      inputs += token == kEnd ? '\n' : static_cast<char>(token);
    }
  }
  std::string whole;
  for (const std::string& document : documents) whole += document + "\n";
  EXPECT_EQ(inputs, whole.substr(0, static_cast<size_t>(samples) * 16));
  EXPECT_LE(whole.size() - inputs.size(), 16u);
}

TEST_F(DatasetTest, SplitsByTheTextOfTheDocument) {
  const auto documents = add_documents(300);
  options_.held_out = 0.2;
  Dataset dataset(options_);
  std::vector<std::string> train;
  std::vector<std::string> held_out;
  for (const std::string& document : documents) {
    const uint64_t hash = xxh3(document.data(), document.size());
    const bool held = CounterRng(0, RandomPurpose::kHeldOut, hash).uniform(0) < 0.2;
    (held ? held_out : train).push_back(document);
  }
  EXPECT_GT(held_out.size(), documents.size() / 10);
  EXPECT_LT(held_out.size(), documents.size() * 3 / 10);
  for (const auto& [split, expected] :
       {std::pair{Split::kTrain, &train}, {Split::kHeldOut, &held_out}}) {
    std::vector<int64_t> ids;
    for (int64_t id = 0; id < dataset.samples(split); ++id) ids.push_back(id);
    EXPECT_EQ(pack(dataset, split, ids), reference(*expected, ids, 16, true));
  }
}

TEST_F(DatasetTest, FingerprintFollowsFromTextsNamesAndOptionsAlone) {
  add_documents(10);
  const std::string first = Dataset(options_).fingerprint();
  EXPECT_EQ(first.size(), 16u);
  EXPECT_EQ(Dataset(options_).fingerprint(), first) << "from the cache";
  std::filesystem::rename(corpus_.path(), corpus_.path() + "-moved");
  DatasetOptions moved = options_;
  moved.sources = {corpus_.path() + "-moved"};
  moved.threads = 1;
  EXPECT_EQ(Dataset(moved).fingerprint(), first) << "another mount point";
  std::filesystem::rename(corpus_.path() + "-moved", corpus_.path());

  std::set<std::string> all = {first};
  const auto expect_new = [&](const DatasetOptions& options) {
    EXPECT_TRUE(all.insert(Dataset(options).fingerprint()).second);
  };
  DatasetOptions other = options_;
  other.sequence_length = 17;
  expect_new(other);
  other = options_;
  other.held_out = 0.01;
  expect_new(other);
  other = options_;
  other.separate_documents = false;
  expect_new(other);
  std::filesystem::rename(corpus_.path("d1000.txt"), corpus_.path("d1000b.txt"));
  expect_new(options_);
  corpus_.add("d1000b.txt", "other text");
  expect_new(options_);
}

TEST_F(DatasetTest, SaysWhatIsMissingWhenTheCorpusIsSmallerThanOneStep) {
  corpus_.add("a.txt", std::string(33, 'a'));
  options_.global_batch = 2;
  EXPECT_EQ(Dataset(options_).samples(Split::kTrain), 2);
  options_.global_batch = 3;
  EXPECT_THAT(error(), testing::AllOf(HasSubstr(corpus_.path()), HasSubstr("2 training samples"),
                                      HasSubstr("train.global_batch is 3"), HasSubstr("add text")));
  options_.held_out = 1;
  EXPECT_THAT(error(),
              testing::AllOf(HasSubstr("0 training samples"), HasSubstr("1 of them held")));
  options_.sources = {corpus_.path("missing")};
  EXPECT_THAT(error(), HasSubstr("cannot be read"));
}

TEST_F(DatasetTest, RefusesASampleThatDoesNotExist) {
  add_documents(10);
  Dataset dataset(options_);
  const int64_t samples = dataset.samples(Split::kTrain);
  for (const int64_t id : {int64_t{-1}, samples, int64_t{1} << 60}) {
    EXPECT_THAT(error_of<DataError>([&] {
                  pack(dataset, Split::kTrain, {0, id});
                }),
                HasSubstr("sample " + std::to_string(id) + " does not exist"));
  }
  EXPECT_THAT(error_of<DataError>([&] { pack(dataset, Split::kHeldOut, {0}); }),
              HasSubstr("held-out"));
}

TEST_F(DatasetTest, TakesItsOptionsFromTheConfig) {
  Config config;
  config.data.sources = {"/a"};
  config.data.cache_mib = 3;
  config.data.held_out = 0.5;
  config.data.separate_documents = false;
  config.train.sequence_length = 99;
  config.train.global_batch = 7;
  const DatasetOptions options = dataset_options(config);
  EXPECT_EQ(options.sources, config.data.sources);
  EXPECT_EQ(options.cache_bytes, 3 << 20);
  EXPECT_EQ(options.held_out, 0.5);
  EXPECT_FALSE(options.separate_documents);
  EXPECT_EQ(options.sequence_length, 99);
  EXPECT_EQ(options.global_batch, 7);
  EXPECT_GE(options.threads, 1);
  config.data.threads = 5;
  EXPECT_EQ(dataset_options(config).threads, 5);
}

}  // namespace
}  // namespace muster
