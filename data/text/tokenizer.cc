#include "data/text/tokenizer.h"

#include "common/error.h"

namespace muster {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  int32_t vocab_size() const override { return 257; }
  int32_t end_of_document() const override { return 256; }
  int token_bytes() const override { return 1; }
  bool is_identity() const override { return true; }
  void encode(std::string_view text, std::string& stored) const override { stored.append(text); }
  std::string decode(int32_t token) const override {
    return token >= 0 && token < 256 ? std::string(1, static_cast<char>(token)) : std::string();
  }
};

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  throw ConfigError("data.tokenizer = \"" + name + "\" is not known: expected \"bytes\"");
}

}  // namespace muster
