// How much memory this host has left.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace muster {

// Bytes that processes can take before one of them is killed for it: MemAvailable of /proc/meminfo,
// or what the memory cgroup of this process or one above it leaves (v2 or v1), where that is less.
// Page cache that nobody uses counts as free. Nullopt: the kernel does not say. `root`: the folder
// that /proc and /sys are in.
std::optional<size_t> available_host_memory(const std::string& root = "");

}  // namespace muster
