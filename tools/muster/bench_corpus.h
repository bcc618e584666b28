// Text for the benchmarks that read some.
#pragma once

#include <string>

namespace muster {

// A folder of text: the Linux kernel's documentation where Debian's linux-doc-6.1 is installed,
// else as much generated text in as many files, written to `scratch`.
std::string bench_corpus(const std::string& scratch);

}  // namespace muster
