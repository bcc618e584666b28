// The safetensors format: 8 bytes little-endian length of a JSON header, the header, then the
// tensors' bytes. The header maps a name to {dtype, shape, data_offsets: [begin, end) after the
// header} and "__metadata__" to an object of strings. Source: the README of the safetensors
// project.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/files.h"
#include "common/tensor.h"

namespace muster {

struct NamedTensor {
  std::string name;
  ConstTensorView data;  // contiguous; in host memory, or on the device of the call's stream
};
struct WrittenFile {
  int64_t bytes = 0;
  uint64_t xxh3 = 0;  // of the whole file
};

// Writes and syncs the file, with the tensors as they are when `stream` has come so far; the caller
// syncs its folder. Throws IoError naming the path, what it needed and what was short; then the
// file is gone.
WrittenFile write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata,
                              const Stream& stream = {});

// A file opened for reading. Only the header is read at once. Throws CheckpointError naming the
// path and what is wrong with it.
class SafetensorsFile {
 public:
  struct Entry {
    DType dtype;
    std::vector<int64_t> shape;
    int64_t begin;  // bytes after the header
    int64_t end;
    int64_t elements() const { return (end - begin) / static_cast<int64_t>(size_of(dtype)); }
  };

  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, Entry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Fills `out` (contiguous) with the elements from `first_element` on of a tensor of its dtype.
  // It may lie on the stream's device, and is filled when the call returns.
  void read(const std::string& name, int64_t first_element, TensorView out,
            const Stream& stream = {}) const;

 private:
  void read_bytes(const std::string& name, int64_t at, char* to, int64_t bytes) const;
  void parse_header(const std::string& header, int64_t data_bytes);

  std::string path_;
  Fd fd_;
  int64_t data_begin_ = 0;
  std::map<std::string, Entry> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace muster
