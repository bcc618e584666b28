#include "data/token_stream.h"

#include <algorithm>

#include "common/check.h"

namespace muster {

void TokenStream::append(uint32_t document, int64_t tokens) {
  MUSTER_CHECK(tokens > 0);
  documents_.push_back(document);
  begins_.push_back(begins_.back() + tokens);
}

int64_t TokenStream::samples(int64_t sequence_length) const {
  return std::max<int64_t>(tokens() - 1, 0) / sequence_length;
}

size_t TokenStream::find(int64_t token) const {
  MUSTER_CHECK(token >= 0 && token < tokens());
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), token);
  return static_cast<size_t>(after - begins_.begin()) - 1;
}

}  // namespace muster
