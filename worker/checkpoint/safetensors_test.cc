#include "worker/checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/hash.h"

namespace muster {
namespace {

class Safetensors : public ::testing::Test {
 protected:
  Safetensors() {
    for (int i = 0; i < 6; ++i) floats_.data<float>()[i] = 0.5f * static_cast<float>(i);
    for (int i = 0; i < 3; ++i) bytes_.data<uint8_t>()[i] = static_cast<uint8_t>('a' + i);
    written_ = write_safetensors(path_, {{"w", floats_}, {"nothing", none_}, {"b", bytes_}},
                                 {{"w", "10:16"}});
  }
  // The file under another content.
  void rewrite(const std::string& content) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << content;
  }
  static std::string file(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + header +
           std::string(data_bytes, 'x');
  }
  std::string error() const {
    try {
      const SafetensorsFile opened(path_);
    } catch (const CheckpointError& e) {
      EXPECT_NE(std::string(e.what()).find(path_), std::string::npos) << e.what();
      return e.what();
    }
    return "";
  }

  const TempDir folder_{"safetensors"};
  const std::string path_ = folder_.path() + "/t.safetensors";
  const Tensor floats_{{2, 3}, DType::kFloat32};
  const Tensor none_{{0}, DType::kFloat32};
  const Tensor bytes_{{3}, DType::kUInt8};
  WrittenFile written_;
};

// Against the format's description, without the reader.
TEST_F(Safetensors, LiesOnDiskAsTheFormatSays) {
  const std::string content = read_file(path_);
  EXPECT_EQ(static_cast<size_t>(written_.bytes), content.size());
  EXPECT_EQ(written_.xxh3, xxh3(content.data(), content.size()));
  uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  const auto header = nlohmann::json::parse(content.substr(8, length));
  EXPECT_EQ(header["__metadata__"]["w"], "10:16");
  EXPECT_EQ(header["w"]["dtype"], "F32");
  EXPECT_EQ(header["w"]["shape"], nlohmann::json({2, 3}));
  EXPECT_EQ(header["w"]["data_offsets"], nlohmann::json({0, 24}));
  EXPECT_EQ(header["b"]["dtype"], "U8");
  EXPECT_EQ(header["b"]["data_offsets"], nlohmann::json({24, 27}));
  EXPECT_EQ(content.size(), 8 + length + 27);
  EXPECT_EQ(std::memcmp(content.data() + 8 + length, floats_.data<float>(), 24), 0);
  EXPECT_EQ(content.substr(8 + length + 24), "abc");
}

TEST_F(Safetensors, ReadsPartsBack) {
  const SafetensorsFile opened(path_);
  EXPECT_EQ(opened.tensors().size(), 3u);
  EXPECT_EQ(opened.metadata().at("w"), "10:16");
  const Tensor part({3}, DType::kFloat32);
  opened.read("w", 2, part);
  EXPECT_EQ(std::memcmp(part.data<float>(), floats_.data<float>() + 2, 12), 0);
  EXPECT_THROW(opened.read("w", 4, part), CheckpointError) << "past the end";
  EXPECT_THROW(opened.read("m", 0, part), CheckpointError) << "not there";
  EXPECT_THROW(opened.read("b", 0, part), CheckpointError) << "of another dtype";
}

TEST_F(Safetensors, EveryTornLengthIsRefused) {
  const std::string content = read_file(path_);
  for (size_t length = 0; length < content.size(); ++length) {
    rewrite(content.substr(0, length));
    EXPECT_NE(error(), "") << length << " of " << content.size() << " bytes were taken";
  }
}

TEST_F(Safetensors, HeadersThatLieAreRefused) {
  const char* headers[] = {
      "not json",
      "[]",
      R"({"w": 1})",
      R"({"w": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}})",
      R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}})",
      R"({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}})",
      R"({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}})",
      R"({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})",
      R"({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 4]}})",
      R"({"w": {"dtype": "F32", "shape": [4611686018427387905, 4], "data_offsets": [0, 16]}})",
      R"({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 6]}})",
      R"({"w": {"dtype": "F32", "shape": [1]}})",
      R"({"__metadata__": {"w": 1}})",
  };
  for (const char* header : headers) {
    rewrite(file(header, 16));
    EXPECT_NE(error(), "") << header;
  }
  rewrite(file(R"({"w": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}})", 4));
  EXPECT_EQ(error(), "") << "a scalar has no dimensions";
}

TEST_F(Safetensors, MissingFileAndUnwritablePathAreNamed) {
  EXPECT_THROW(SafetensorsFile(folder_.path() + "/none"), CheckpointError);
  const std::string nowhere = folder_.path() + "/no/such/folder/t";
  try {
    write_safetensors(nowhere, {}, {});
    FAIL() << "it was written";
  } catch (const IoError& e) {
    EXPECT_NE(std::string(e.what()).find(nowhere), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace muster
