#!/usr/bin/env bash
# Fails if a source file is not as clang-format (.clang-format) would have it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 -r clang-format --dry-run --Werror
