#include "tools/muster/bench_corpus.h"

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <fstream>

namespace muster {

std::string bench_corpus(const std::string& scratch) {
  const std::string kernel_docs = "/usr/share/doc/linux-doc-6.1/html/_sources";
  if (std::filesystem::exists(kernel_docs)) return kernel_docs;
  uint32_t state = 1;
  for (int file = 0; file < 3000; ++file) {
    std::string text;
    while (text.size() < 8000) {
      state = state * 1664525U + 1013904223U;
      text += fmt::format("{:x}{}", state >> 20, state % 7 == 0 ? ".\n" : " ");
    }
    std::ofstream(fmt::format("{}/{}.txt", scratch, file)) << text;
  }
  return scratch;
}

}  // namespace muster
