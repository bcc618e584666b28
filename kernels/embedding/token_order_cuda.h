// Tokens in order of their ids: the sort behind embedding_order() and embedding_backward().
#pragma once

#include <cuda_runtime_api.h>

#include "common/tensor.h"

namespace muster::cuda {

// One row of an order. As a 64-bit number, ids sort first and equal ids by token.
struct TokenOfId {
  uint32_t token;
  uint32_t id;
};

// Bytes of scratch memory that sort_tokens() takes; a multiple of 256.
size_t token_sort_bytes(int64_t tokens, int64_t vocab);

// out [tokens]: the tokens in order of ids, each in [0, vocab). `scratch` is aligned to 256 bytes.
void sort_tokens(const Stream& stream, TokenOfId* out, const int32_t* ids, int64_t tokens,
                 int64_t vocab, void* scratch);

}  // namespace muster::cuda
