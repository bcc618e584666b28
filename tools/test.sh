#!/usr/bin/env bash
# Installs what is needed, builds, and passes every check and test. What CI runs.
#   tools/test.sh            everything
#   tools/test.sh quick      without the sanitizer builds and the linter
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc)
started=$SECONDS
step() { printf '\n== %s (at %d s)\n' "$1" $((SECONDS - started)); }

step "dependencies"
tools/install_dependencies.sh --checks --demo

step "format and layers"
tools/check_format.sh
tools/check_layers.sh

step "build"
cmake -S . -B build -G Ninja -DMUSTER_TESTS=ON >/dev/null
cmake --build build -j "$jobs"

step "tests"
ctest --test-dir build --output-on-failure -j "$jobs" --timeout 300

step "relocatable install"
tools/check_install.sh build

if [[ "${1:-}" != quick ]]; then
  step "lint"
  tools/check_tidy.sh build

  step "tests under the address and undefined-behaviour sanitizers"
  cmake -S . -B build-asan -G Ninja -DMUSTER_SANITIZE=address,undefined -DMUSTER_CUDA=OFF >/dev/null
  cmake --build build-asan -j "$jobs"
  ctest --test-dir build-asan --output-on-failure -j "$jobs" --timeout 300 -LE slow

  step "tests of the concurrent parts under the thread sanitizer"
  cmake -S . -B build-tsan -G Ninja -DMUSTER_SANITIZE=thread -DMUSTER_CUDA=OFF >/dev/null
  cmake --build build-tsan -j "$jobs" --target muster_common_test muster_coordinator_test muster_data_test
  # What was not built has no label.
  ctest --test-dir build-tsan --output-on-failure -j "$jobs" --timeout 300 -L cpu
fi

step "all passed"
