#include "data/text/source_scan.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <unordered_set>

#include "common/error.h"
#include "data/text/glob.h"

namespace muster {
namespace {

// Where a path leads once all links are resolved; empty when it leads nowhere.
std::string canonical(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> resolved(::realpath(path.c_str(), nullptr),
                                                             &std::free);
  return resolved ? std::string(resolved.get()) : std::string();
}

struct Entry {
  std::string name;
  unsigned char type;
};

// One source: walks it and gathers its files.
class Walker {
 public:
  Walker(std::string number, std::unordered_set<std::string>& seen,
         std::vector<SkippedFile>& skipped)
      : number_(std::move(number)), seen_(seen), skipped_(skipped) {}

  // `pattern` selects among the paths below `root`; an empty one takes them all.
  void walk(const std::string& root, std::vector<std::string> pattern) {
    pattern_ = std::move(pattern);
    std::vector<std::string> path;
    folder(root, canonical(root), "", path);
  }
  void file(const std::string& path, const std::string& real, const std::string& relative,
            TextFormat format) {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) {
      skipped_.push_back({path, std::string("cannot be opened: ") + std::strerror(errno)});
    } else if (!S_ISREG(info.st_mode)) {
      skipped_.push_back({path, "is not a regular file"});
    } else {
      found_.push_back(
          {{path, fmt::format("{}:{}", number_, relative), format, info.st_size,
            info.st_mtim.tv_sec * int64_t{1000000000} + info.st_mtim.tv_nsec, info.st_ino},
           real});
    }
  }
  // The files in order, without those that an earlier source or path has led to.
  size_t finish(std::vector<SourceFile>& files) {
    std::sort(found_.begin(), found_.end(),
              [](const Found& a, const Found& b) { return a.file.relative < b.file.relative; });
    for (Found& found : found_) {
      if (seen_.insert(found.real).second) files.push_back(std::move(found.file));
    }
    return found_.size();
  }

 private:
  struct Found {
    SourceFile file;
    std::string real;
  };

  std::optional<std::vector<Entry>> list(const std::string& path) {
    const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), &::closedir);
    if (dir == nullptr) return std::nullopt;
    std::vector<Entry> entries;
    errno = 0;
    while (const dirent* entry = ::readdir(dir.get())) {
      if (std::strcmp(entry->d_name, ".") == 0 || std::strcmp(entry->d_name, "..") == 0) continue;
      entries.push_back({entry->d_name, entry->d_type});
    }
    if (errno != 0) return std::nullopt;
    // Sorted, so that which of two links into a loop comes first does not depend on the disk.
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.name < b.name; });
    return entries;
  }

  void folder(const std::string& path, const std::string& real, const std::string& relative,
              std::vector<std::string>& parts) {
    if (!folders_.insert(real).second) return;
    const auto entries = list(path);
    if (!entries) {
      skipped_.push_back({path, std::string("folder cannot be read: ") + std::strerror(errno)});
      return;
    }
    for (const Entry& entry : *entries) {
      parts.push_back(entry.name);
      const GlobMatch match = selects(parts);
      if (match != GlobMatch::kNo) visit(path, real, relative, entry, match, parts);
      parts.pop_back();
    }
  }

  GlobMatch selects(const std::vector<std::string>& parts) const {
    if (!pattern_.empty()) return match_glob(pattern_, parts);
    return parts.back().starts_with('.') ? GlobMatch::kNo : GlobMatch::kYes;
  }

  void visit(const std::string& folder_path, const std::string& folder_real,
             const std::string& folder_relative, const Entry& entry, GlobMatch match,
             std::vector<std::string>& parts) {
    const std::string path = folder_path + "/" + entry.name;
    const std::string relative =
        folder_relative.empty() ? entry.name : folder_relative + "/" + entry.name;
    const auto format = text_format(entry.name);
    const bool may_be_text = format && match == GlobMatch::kYes;
    unsigned char type = entry.type;
    std::string real = folder_real + "/" + entry.name;
    if (type == DT_LNK || type == DT_UNKNOWN) {
      real = canonical(path);
      struct stat info;
      if (real.empty() || ::stat(real.c_str(), &info) != 0) {
        if (may_be_text) {
          skipped_.push_back({path, std::string("leads nowhere: ") + std::strerror(errno)});
        }
        return;
      }
      type = S_ISDIR(info.st_mode) ? DT_DIR : DT_REG;
    }
    if (type == DT_DIR) {
      folder(path, real, relative, parts);
    } else if (may_be_text) {
      file(path, real, relative, *format);
    }
  }

  std::string number_;
  std::vector<std::string> pattern_;
  std::unordered_set<std::string> folders_;  // walked, by their canonical paths
  std::unordered_set<std::string>& seen_;    // files taken, by their canonical paths
  std::vector<SkippedFile>& skipped_;
  std::vector<Found> found_;
};

void scan_source(const std::string& source, size_t number, std::unordered_set<std::string>& seen,
                 SourceScan& scan) {
  const std::string named = fmt::format("data.sources: \"{}\" ", source);
  Walker walker(std::to_string(number), seen, scan.skipped);
  struct stat info;
  if (::stat(source.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) {
      walker.walk(source, {});
      if (walker.finish(scan.files) == 0) {
        throw DataError(named + "holds no text files: expected " + kTextExtensions);
      }
      return;
    }
    const auto format = text_format(source);
    if (!format) {
      throw DataError(named + "is not a text file: rename it to, or name a file that ends in, " +
                      kTextExtensions);
    }
    walker.file(source, canonical(source), source.substr(source.rfind('/') + 1), *format);
    if (walker.finish(scan.files) == 0) throw DataError(named + scan.skipped.back().why);
    return;
  }
  if (!is_glob(source)) {
    throw DataError(named + "cannot be read: " + std::strerror(errno) +
                    "; correct the path or install the corpus");
  }
  // The walk starts at the last folder before the first wildcard.
  std::vector<std::string> parts = split_path(source);
  const auto fixed = std::find_if(parts.begin(), parts.end(), is_glob) - parts.begin();
  const std::string root = fmt::format("{}{}", source.starts_with('/') ? "/" : "./",
                                       fmt::join(parts.begin(), parts.begin() + fixed, "/"));
  parts.erase(parts.begin(), parts.begin() + fixed);
  walker.walk(root, parts);
  if (walker.finish(scan.files) == 0) {
    throw DataError(named + "matches no text file: expected " + kTextExtensions);
  }
}

}  // namespace

SourceScan scan_sources(const std::vector<std::string>& sources) {
  if (sources.empty()) {
    throw DataError("data.sources is empty: name the files, folders or patterns to train on");
  }
  SourceScan scan;
  std::unordered_set<std::string> seen;
  for (size_t i = 0; i < sources.size(); ++i) scan_source(sources[i], i, seen, scan);
  return scan;
}

}  // namespace muster
