#include "data/dataset.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <limits>

#include "common/config/config.h"
#include "common/error.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/rng.h"

namespace muster {
namespace {

// A document's place follows from its text alone: no seed, so that runs compare on the same
// held-out text, and no path, so that copies of a document are never on both sides.
bool is_held_out(const IndexedDocument& document, double share) {
  return CounterRng(0, RandomPurpose::kHeldOut, document.hash).uniform(0) < share;
}

int threads_of_machine() {
  cpu_set_t cpus;
  const int count = ::sched_getaffinity(0, sizeof(cpus), &cpus) == 0 ? CPU_COUNT(&cpus) : 1;
  return std::clamp(count, 1, 16);
}

std::string fingerprint_of(const TextIndex& index, const DatasetOptions& options,
                           const Tokenizer& tokenizer) {
  Xxh3 hash;
  const auto text = [&hash](const std::string& value) {
    const uint64_t size = value.size();
    hash.update(&size, sizeof(size));
    hash.update(value.data(), value.size());
  };
  text(fmt::format("{} {} {} {}", tokenizer.name(), options.sequence_length, options.held_out,
                   options.separate_documents));
  for (const IndexedFile& file : index.files) {
    text(file.source.relative);
    hash.update(&file.digest, sizeof(file.digest));
  }
  return to_hex(hash.digest());
}

DatasetOptions with_defaults(DatasetOptions options) {
  if (options.cache_dir.empty()) options.cache_dir = default_cache_dir();
  return options;
}

}  // namespace

DatasetOptions dataset_options(const Config& config) {
  DatasetOptions options;
  options.sources = config.data.sources;
  options.tokenizer = config.data.tokenizer;
  options.held_out = config.data.held_out;
  options.separate_documents = config.data.separate_documents;
  options.sequence_length = config.train.sequence_length;
  options.global_batch = config.train.global_batch;
  options.cache_dir = config.data.cache_dir;
  options.cache_bytes = config.data.cache_mib << 20;
  options.threads =
      config.data.threads > 0 ? static_cast<int>(config.data.threads) : threads_of_machine();
  return options;
}

Dataset::Dataset(const DatasetOptions& options, std::stop_token stop)
    : options_(with_defaults(options)),
      tokenizer_(make_tokenizer(options_.tokenizer)),
      index_(build_text_index(options_.sources, *tokenizer_, options_.cache_dir, options_.threads,
                              std::move(stop))),
      fingerprint_(fingerprint_of(index_, options_, *tokenizer_)),
      cache_(index_, *tokenizer_, options_.cache_bytes, options_.cache_dir) {
  if (index_.documents.size() > std::numeric_limits<uint32_t>::max()) {
    throw DataError("data.sources hold more than 2^32 documents: split the corpus");
  }
  file_of_.resize(index_.documents.size());
  for (size_t i = 0; i < index_.files.size(); ++i) {
    const IndexedFile& file = index_.files[i];
    for (size_t d = file.first_document; d < file.first_document + file.documents; ++d) {
      file_of_[d] = static_cast<uint32_t>(i);
      const IndexedDocument& document = index_.documents[d];
      TokenStream& stream = is_held_out(document, options_.held_out) ? held_out_ : train_;
      stream.append(static_cast<uint32_t>(d), document.tokens);
    }
  }
  if (samples(Split::kTrain) < options_.global_batch) {
    throw DataError(fmt::format(
        "the corpus is smaller than one step: data.sources ({}{}) hold {} training samples of {} "
        "tokens ({} documents, {} of them held out), but train.global_batch is {}; add text, or "
        "lower train.global_batch or train.sequence_length",
        options_.sources[0], options_.sources.size() > 1 ? ", …" : "", samples(Split::kTrain),
        options_.sequence_length, index_.documents.size(), held_out_.documents(),
        options_.global_batch));
  }
}

int64_t Dataset::samples(Split split) const {
  return stream(split).samples(options_.sequence_length);
}

int64_t Dataset::tokens() const {
  return train_.tokens() + held_out_.tokens();
}

void Dataset::read_tokens(const TokenStream& stream, int64_t first, int64_t count, int32_t* out) {
  std::shared_ptr<const TokenFile> file;
  uint32_t file_number = 0;
  for (size_t i = stream.find(first); count > 0; ++i) {
    const uint32_t number = stream.document(i);
    if (file == nullptr || file_number != file_of_[number]) {
      file_number = file_of_[number];
      file = cache_.get(file_number);
    }
    const int64_t part = std::min(count, stream.end(i) - first);
    const bool to_the_end = first + part == stream.end(i);
    const int64_t stored = part - (to_the_end ? 1 : 0);
    file->read(index_.documents[number].offset + first - stream.begin(i), stored, out);
    if (to_the_end) out[stored] = tokenizer_->end_of_document();
    first += part;
    out += part;
    count -= part;
  }
}

void Dataset::pack(Split split, std::span<const int64_t> ids, uint64_t tag,
                   const SlotLayout& layout, char* slot_memory) {
  const int64_t length = options_.sequence_length;
  MUSTER_CHECK(layout.sequence_length() == length && !ids.empty() &&
               static_cast<int64_t>(ids.size()) <= layout.micro_batch());
  const TokenStream& stream = this->stream(split);
  const Slot slot = layout.slot(slot_memory);
  const int32_t end_of_document = tokenizer_->end_of_document();
  SlotHeader header;
  std::vector<int32_t> tokens(static_cast<size_t>(length) + 1);
  int64_t at = 0;  // token of the batch
  int64_t segment_begin = 0;
  const auto begin_segment = [&](int64_t begin) {
    header.max_segment = std::max(header.max_segment, begin - segment_begin);
    slot.cu_seqlens[header.segments++] = static_cast<int32_t>(begin);
    segment_begin = begin;
  };
  for (const int64_t id : ids) {
    if (id < 0 || id >= samples(split)) {
      throw DataError(fmt::format("sample {} does not exist: the {} samples are 0 to {}", id,
                                  split == Split::kTrain ? "training" : "held-out",
                                  samples(split) - 1));
    }
    slot.ids[header.samples++] = id;
    read_tokens(stream, id * length, length + 1, tokens.data());
    for (int64_t i = 0; i < length; ++i, ++at) {
      const bool after_document =
          options_.separate_documents && i > 0 && tokens[i - 1] == end_of_document;
      if (i == 0 || after_document) begin_segment(at);
      const bool ignored = options_.separate_documents && tokens[i] == end_of_document;
      slot.tokens[at] = tokens[i];
      slot.targets[at] = ignored ? kIgnoredTarget : tokens[i + 1];
      slot.positions[at] = static_cast<int32_t>(at - segment_begin);
      header.target_tokens += ignored ? 0 : 1;
    }
  }
  header.max_segment = std::max(header.max_segment, at - segment_begin);
  slot.cu_seqlens[header.segments] = static_cast<int32_t>(at);
  header.magic = kSlotMagic;
  header.tag = tag;
  *slot.header = header;
}

}  // namespace muster
