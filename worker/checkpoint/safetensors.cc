#include "worker/checkpoint/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "common/error.h"
#include "common/hash.h"
#include "kernels/runtime/runtime.h"

namespace muster {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using Json = nlohmann::json;

constexpr size_t kPiece = 4 << 20;  // hashed while it is still in the cache, then written
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kLongestHeader = 100 << 20;  // as in the reference implementation

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr DTypeName kDTypes[] = {{DType::kFloat32, "F32"}, {DType::kBFloat16, "BF16"},
                                 {DType::kFloat16, "F16"}, {DType::kFloat64, "F64"},
                                 {DType::kInt32, "I32"},   {DType::kInt64, "I64"},
                                 {DType::kUInt8, "U8"}};

std::string header_of(const std::vector<NamedTensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const NamedTensor& tensor : tensors) {
    MUSTER_CHECK(tensor.data.contiguous() && !header.contains(tensor.name), tensor.name);
    const auto* dtype = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& one) {
      return one.dtype == tensor.data.dtype();
    });
    const Shape& shape = tensor.data.shape();
    const int64_t end = offset + static_cast<int64_t>(tensor.data.bytes());
    header[tensor.name] = {
        {"dtype", dtype->name},
        {"shape", std::vector<int64_t>(shape.dims.begin(), shape.dims.begin() + shape.rank)},
        {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data is aligned
  return text;
}

// Device memory goes through page-locked pieces of this size.
constexpr int64_t kStagedPiece = 64 << 20;

// Calls use(piece of the tensor as bytes, staging memory of the same size).
template <typename Void, typename Use>
void for_each_piece(const BasicTensorView<Void>& tensor, const Use& use) {
  const auto bytes = static_cast<int64_t>(tensor.bytes());
  const BasicTensorView<Void> all(tensor.raw(), DType::kUInt8, {bytes}, tensor.device());
  const Tensor staging({std::min(bytes, kStagedPiece)}, DType::kUInt8, pinned_allocator());
  for (int64_t at = 0; at < bytes; at += kStagedPiece) {
    const int64_t end = std::min(at + kStagedPiece, bytes);
    use(all.slice(at, end), staging.view().slice(0, end - at));
  }
}

std::string errno_text() {
  return std::strerror(errno);
}

}  // namespace

WrittenFile write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata,
                              const Stream& stream) {
  const std::string header = header_of(tensors, metadata);
  const auto length = static_cast<uint64_t>(header.size());
  int64_t total = kLengthBytes + static_cast<int64_t>(header.size());
  for (const NamedTensor& tensor : tensors) total += static_cast<int64_t>(tensor.data.bytes());

  Xxh3 hash;
  int64_t written = 0;
  try {
    const Fd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!fd.valid()) throw IoError(path + ": cannot create: " + errno_text());
    const auto put = [&](const void* data, size_t bytes) {
      std::string_view left(static_cast<const char*>(data), bytes);
      while (!left.empty()) {
        const std::string_view piece = left.substr(0, kPiece);
        hash.update(piece.data(), piece.size());
        write_all(fd.get(), piece, path);
        written += static_cast<int64_t>(piece.size());
        left.remove_prefix(piece.size());
      }
    };
    put(&length, sizeof(length));
    put(header.data(), header.size());
    for (const NamedTensor& tensor : tensors) {
      if (tensor.data.device().is_cpu()) {
        put(tensor.data.raw(), tensor.data.bytes());
        continue;
      }
      for_each_piece(tensor.data, [&](ConstTensorView piece, TensorView staging) {
        copy(stream, staging, piece);
        synchronize(stream);
        put(staging.raw(), staging.bytes());
      });
    }
    if (fsync(fd.get()) != 0) throw IoError(path + ": cannot sync: " + errno_text());
  } catch (const IoError& e) {
    unlink(path.c_str());
    throw IoError(std::string(e.what()) + " (it needs " + std::to_string(total) + " bytes, " +
                  std::to_string(written) + " were written)");
  }
  return {total, hash.digest()};
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (!fd_.valid()) throw CheckpointError(path + ": cannot be read: " + errno_text());
  struct stat info {};
  if (fstat(fd_.get(), &info) != 0) throw CheckpointError(path + ": " + errno_text());
  const auto size = static_cast<int64_t>(info.st_size);
  uint64_t length = 0;
  if (size < kLengthBytes || pread(fd_.get(), &length, sizeof(length), 0) != kLengthBytes ||
      length > static_cast<uint64_t>(std::min(size - kLengthBytes, kLongestHeader))) {
    throw CheckpointError(path + ": torn, or no safetensors file (" + std::to_string(size) +
                          " bytes)");
  }
  std::string header(length, '\0');
  if (pread(fd_.get(), header.data(), length, kLengthBytes) != static_cast<ssize_t>(length)) {
    throw CheckpointError(path + ": cannot read the header: " + errno_text());
  }
  data_begin_ = kLengthBytes + static_cast<int64_t>(length);
  try {
    parse_header(header, size - data_begin_);
  } catch (const Json::exception& e) {
    throw CheckpointError(path + ": bad safetensors header: " + e.what());
  }
}

void SafetensorsFile::parse_header(const std::string& header, int64_t data_bytes) {
  const Json parsed = Json::parse(header);
  if (!parsed.is_object()) throw CheckpointError(path_ + ": its header is no JSON object");
  for (const auto& [name, value] : parsed.items()) {
    if (name == "__metadata__") {
      metadata_ = value.get<std::map<std::string, std::string>>();
      continue;
    }
    const std::string dtype_name = value.at("dtype").get<std::string>();
    const auto* dtype = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                     [&](const auto& one) { return one.name == dtype_name; });
    if (dtype == std::end(kDTypes)) {
      throw CheckpointError(
          fmt::format("{}: {} has the unknown dtype {}", path_, name, dtype_name));
    }
    Entry entry{dtype->dtype, value.at("shape").get<std::vector<int64_t>>(),
                value.at("data_offsets").at(0).get<int64_t>(),
                value.at("data_offsets").at(1).get<int64_t>()};
    bool fits = entry.begin >= 0 && entry.begin <= entry.end && entry.end <= data_bytes;
    // Divides instead of multiplying: sizes come from outside and must not overflow.
    int64_t left = fits ? entry.elements() : 0;
    bool empty = false;
    for (const int64_t size : entry.shape) {
      fits = fits && size >= 0 && (size == 0 || left % size == 0);
      empty = empty || size == 0;
      if (size > 0) left /= size;
    }
    fits = fits && (empty ? entry.begin == entry.end
                          : left == 1 && (entry.end - entry.begin) % size_of(entry.dtype) == 0);
    if (!fits) {
      throw CheckpointError(path_ + ": torn, or its header is wrong: " + name +
                            " does not lie in the file as its shape says");
    }
    tensors_.emplace(name, std::move(entry));
  }
}

void SafetensorsFile::read(const std::string& name, int64_t first_element, TensorView out,
                           const Stream& stream) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw CheckpointError(path_ + ": " + name + " is missing");
  const Entry& entry = found->second;
  const auto element = static_cast<int64_t>(size_of(entry.dtype));
  MUSTER_CHECK(out.contiguous() && first_element >= 0, name);
  if (entry.dtype != out.dtype() || first_element + out.numel() > entry.elements()) {
    throw CheckpointError(path_ + ": " + name +
                          " is not what was expected: " + std::to_string(entry.elements()) +
                          " elements of " + name_of(entry.dtype));
  }
  int64_t at = data_begin_ + entry.begin + first_element * element;
  if (out.device().is_cpu()) {
    read_bytes(name, at, static_cast<char*>(out.raw()), out.numel() * element);
    return;
  }
  for_each_piece(out, [&](TensorView piece, TensorView staging) {
    const auto bytes = static_cast<int64_t>(staging.bytes());
    read_bytes(name, at, static_cast<char*>(staging.raw()), bytes);
    at += bytes;
    copy(stream, piece, staging);
    synchronize(stream);
  });
}

void SafetensorsFile::read_bytes(const std::string& name, int64_t at, char* to,
                                 int64_t bytes) const {
  while (bytes > 0) {
    const ssize_t got = pread(fd_.get(), to, bytes, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      throw CheckpointError(path_ + ": cannot read " + name + ": " +
                            (got < 0 ? errno_text() : "it was cut off meanwhile"));
    }
    to += got;
    at += got;
    bytes -= got;
  }
}

}  // namespace muster
