// Finds the text files of data.sources.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/text/format.h"

namespace muster {

struct SourceFile {
  std::string path;      // to open it
  std::string relative;  // "SOURCE:PATH", its number in the list of sources and its path below the
                         // source's root: the same on every node, whatever the mount point
  TextFormat format;
  int64_t size = 0;  // these three tell whether it has changed since it was last read
  int64_t mtime_ns = 0;
  uint64_t inode = 0;
};

struct SkippedFile {
  std::string path;
  std::string why;
};

struct SourceScan {
  std::vector<SourceFile> files;
  std::vector<SkippedFile> skipped;  // unreadable folders and files, dangling links
};

// Sources in their order; inside each, files by the bytes of their relative path, never by the
// order of the directory. A folder is walked recursively; names that begin with '.' are left out.
// Links are followed; a file or folder that is reached twice counts once, where it came first, so
// loops end. Files of other extensions are ignored inside folders and patterns. Throws DataError
// when a source does not exist, a pattern matches no text file, a folder holds none, or a file
// named directly is no text file, saying which source and what to do.
SourceScan scan_sources(const std::vector<std::string>& sources);

}  // namespace muster
