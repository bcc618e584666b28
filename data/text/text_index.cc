#include "data/text/text_index.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "common/error.h"
#include "common/logging.h"
#include "data/text/index_cache.h"

namespace muster {
namespace {

// Records that must not outlive this start: the reason may go away without the file changing.
bool may_be_cached(const FileRecord& record, bool io_failure) {
  return record.failure.empty() || !io_failure;
}

// Reads the files that the cache does not know, in parallel.
class Scanner {
 public:
  Scanner(const std::vector<const SourceFile*>& files, const Tokenizer& tokenizer,
          std::stop_token stop)
      : files_(files),
        tokenizer_(tokenizer),
        stop_(std::move(stop)),
        records_(files.size()),
        cacheable_(files.size()),
        order_(files.size()),
        next_log_(Clock::now() + kLogEvery) {
    // Largest first, so that no thread is left alone with a large file at the end.
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::sort(order_.begin(), order_.end(),
              [this](size_t a, size_t b) { return files_[a]->size > files_[b]->size; });
  }

  void run(int threads) {
    const size_t count = std::min<size_t>(static_cast<size_t>(threads), files_.size());
    std::vector<std::jthread> pool;
    for (size_t i = 1; i < count; ++i) pool.emplace_back([this] { work(); });
    work();
    pool.clear();  // joins
    if (failure_) std::rethrow_exception(failure_);
  }
  std::vector<FileRecord>& records() { return records_; }
  bool cacheable(size_t i) const { return cacheable_[i] != 0; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kLogEvery{5};

  void work() {
    try {
      for (size_t i; (i = next_.fetch_add(1)) < order_.size();) {
        read(order_[i]);
        log_progress(i + 1);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = std::current_exception();
      next_ = order_.size();
    }
  }

  void read(size_t i) {
    const SourceFile& file = *files_[i];
    FileRecord& record = records_[i];
    record.size = file.size;
    record.mtime_ns = file.mtime_ns;
    record.inode = file.inode;
    bool io_failure = false;
    DocumentIndexer indexer(tokenizer_, {}, stop_);
    try {
      const ReadReport report = read_documents(file.path, file.format, indexer);
      record.bad_lines = report.bad_lines;
      record.first_bad = report.first_bad;
      record.text_bytes = indexer.text_bytes();
      record.documents = indexer.documents();
      if (record.documents.empty()) {
        record.failure =
            report.bad_lines == 0 ? "is empty" : "has no usable line; " + report.first_bad;
      }
    } catch (const DataError& error) {
      record.failure = error.what();
    } catch (const IoError& error) {
      record.failure = error.what();
      io_failure = true;
    }
    cacheable_[i] = may_be_cached(record, io_failure);
  }

  void log_progress(size_t done) {
    const std::lock_guard lock(mutex_);
    if (Clock::now() < next_log_) return;
    next_log_ = Clock::now() + kLogEvery;
    spdlog::info("indexing: {} of {} files", done, files_.size());
  }

  const std::vector<const SourceFile*>& files_;
  const Tokenizer& tokenizer_;
  std::stop_token stop_;
  std::vector<FileRecord> records_;
  std::vector<char> cacheable_;  // not bool: threads write neighbours
  std::vector<size_t> order_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;  // guards what follows
  std::exception_ptr failure_;
  Clock::time_point next_log_;
};

void add_file(TextIndex& index, const SourceFile& file, const FileRecord& record) {
  if (!record.failure.empty()) {
    index.skipped.push_back({file.path, record.failure});
    return;
  }
  if (record.bad_lines > 0) {
    index.partly_used.push_back(
        {file.path, std::to_string(record.bad_lines) + " bad lines left out; " + record.first_bad});
  }
  const IndexedDocument& last = record.documents.back();
  index.files.push_back({file, index.documents.size(), record.documents.size(),
                         last.offset + last.tokens - 1,
                         digest_of(record.documents.data(), record.documents.size())});
  index.documents.insert(index.documents.end(), record.documents.begin(), record.documents.end());
  index.text_bytes += record.text_bytes;
}

}  // namespace

TextIndex build_text_index(const std::vector<std::string>& sources, const Tokenizer& tokenizer,
                           const std::string& cache_dir, int threads, std::stop_token stop) {
  SourceScan scan = scan_sources(sources);
  const std::string cache_path = index_cache_path(cache_dir, sources, tokenizer);
  FileRecords cache = load_index_cache(cache_path);

  std::vector<const SourceFile*> unknown;
  for (const SourceFile& file : scan.files) {
    const auto known = cache.find(file.path);
    if (known == cache.end() || !known->second.matches(file)) unknown.push_back(&file);
  }
  Scanner scanner(unknown, tokenizer, std::move(stop));
  scanner.run(threads);

  TextIndex index;
  index.skipped = std::move(scan.skipped);
  index.files_read = unknown.size();
  index.files_cached = scan.files.size() - unknown.size();
  FileRecords kept;
  size_t next_unknown = 0;
  for (const SourceFile& file : scan.files) {
    const bool read_now = next_unknown < unknown.size() && unknown[next_unknown] == &file;
    FileRecord& record = read_now ? scanner.records()[next_unknown] : cache[file.path];
    add_file(index, file, record);
    if (!read_now || scanner.cacheable(next_unknown)) kept[file.path] = std::move(record);
    if (read_now) ++next_unknown;
  }
  if (!unknown.empty() || kept.size() != cache.size()) save_index_cache(cache_path, kept);
  if (index.documents.empty()) {
    std::string message = "data.sources hold no text: ";
    message += std::to_string(scan.files.size()) + " text files were found and none can be used";
    if (!index.skipped.empty()) {
      message += ", the first because " + index.skipped[0].path + " " + index.skipped[0].why;
    }
    throw DataError(message);
  }
  return index;
}

}  // namespace muster
