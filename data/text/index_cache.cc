#include "data/text/index_cache.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string_view>
#include <type_traits>

#include "common/error.h"
#include "common/files.h"
#include "common/hash.h"
#include "common/logging.h"

namespace muster {
namespace {

// Raised with every change of the layout. File: magic, then per file its record, then XXH3 of all
// that. Integers are 64-bit in this machine's byte order (little-endian everywhere we run).
constexpr char kMagic[] = "MUSTER-INDEX-1\n";
constexpr size_t kMagicBytes = sizeof(kMagic) - 1;

class Writer {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_integral_v<T> && sizeof(T) == 8);
    out_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void string(const std::string& text) {
    number(uint64_t{text.size()});
    out_.append(text);
  }
  std::string& out() { return out_; }

 private:
  std::string out_{kMagic, kMagicBytes};
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string string() { return std::string(take(number<uint64_t>())); }
  // A count of things that take at least `bytes_each`: refuses one that the rest cannot hold.
  uint64_t count(size_t bytes_each) {
    const auto n = number<uint64_t>();
    if (n > in_.size() / bytes_each) throw DataError("a count is out of range");
    return n;
  }

 private:
  std::string_view take(uint64_t bytes) {
    if (bytes > in_.size()) throw DataError("it ends early");
    const std::string_view part = in_.substr(0, bytes);
    in_.remove_prefix(bytes);
    return part;
  }
  std::string_view in_;
};

std::string serialize(const FileRecords& records) {
  Writer writer;
  writer.number(uint64_t{records.size()});
  for (const auto& [path, record] : records) {
    writer.string(path);
    writer.number(record.size);
    writer.number(record.mtime_ns);
    writer.number(record.inode);
    writer.string(record.failure);
    writer.number(record.bad_lines);
    writer.string(record.first_bad);
    writer.number(record.text_bytes);
    writer.number(uint64_t{record.documents.size()});
    for (const IndexedDocument& document : record.documents) {  // offsets follow from lengths
      writer.number(document.tokens);
      writer.number(document.hash);
    }
  }
  const uint64_t sum = xxh3(writer.out().data(), writer.out().size());
  writer.number(sum);
  return std::move(writer.out());
}

FileRecords parse(std::string_view bytes) {
  if (bytes.substr(0, kMagicBytes) != kMagic) throw DataError("it is of another version");
  if (bytes.size() < kMagicBytes + 16) throw DataError("it ends early");
  uint64_t sum;
  std::memcpy(&sum, bytes.data() + bytes.size() - 8, 8);
  bytes.remove_suffix(8);
  if (xxh3(bytes.data(), bytes.size()) != sum) throw DataError("its checksum is wrong");
  Reader reader(bytes.substr(kMagicBytes));
  FileRecords records;
  const uint64_t files = reader.count(64);
  records.reserve(files);
  for (uint64_t i = 0; i < files; ++i) {
    FileRecord& record = records[reader.string()];
    record.size = reader.number<int64_t>();
    record.mtime_ns = reader.number<int64_t>();
    record.inode = reader.number<uint64_t>();
    record.failure = reader.string();
    record.bad_lines = reader.number<int64_t>();
    record.first_bad = reader.string();
    record.text_bytes = reader.number<int64_t>();
    record.documents.resize(reader.count(16));
    int64_t offset = 0;
    for (IndexedDocument& document : record.documents) {
      document.offset = offset;
      document.tokens = reader.number<int64_t>();
      document.hash = reader.number<uint64_t>();
      offset += document.tokens - 1;
    }
  }
  return records;
}

}  // namespace

std::string index_cache_path(const std::string& cache_dir, const std::vector<std::string>& sources,
                             const Tokenizer& tokenizer) {
  std::string key = tokenizer.name();
  for (const std::string& source : sources) {
    key += '\0' + std::filesystem::absolute(source).lexically_normal().string();
  }
  return cache_dir + "/index-" + to_hex(xxh3(key.data(), key.size()));
}

FileRecords load_index_cache(const std::string& path) {
  if (::access(path.c_str(), F_OK) != 0) return {};
  try {
    return parse(read_file(path));
  } catch (const Error& error) {
    spdlog::info("the index cache {} is built anew: {}", path, error.what());
    return {};
  }
}

void save_index_cache(const std::string& path, const FileRecords& records) noexcept {
  try {
    make_dirs(path.substr(0, path.rfind('/')));
    write_file_atomic(path, serialize(records));
  } catch (const std::exception& error) {
    spdlog::warn("the index cache cannot be written, the next start reads the corpus again: {}",
                 error.what());
  }
}

}  // namespace muster
