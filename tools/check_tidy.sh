#!/usr/bin/env bash
# clang-tidy over the sources that changed since a commit (default: the last one; MUSTER_TIDY_BASE=all for everything).
#   tools/check_tidy.sh BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:?usage: $0 BUILD_DIR}
base=${MUSTER_TIDY_BASE:-HEAD~1}
if [[ $base == all ]] || ! git rev-parse -q --verify "$base^{commit}" >/dev/null; then
  files=$(git ls-files '*.cc')
else
  files=$(git diff --name-only --diff-filter=d "$base" -- '*.cc')
fi
[[ -z $files ]] && exit 0
# clang cannot read the headers that g++ precompiled.
database=$(mktemp -d)
trap 'rm -rf "$database"' EXIT
sed -E 's# -Winvalid-pch##; s# -include [^ ]*cmake_pch\.hxx##' "$build/compile_commands.json" \
  > "$database/compile_commands.json"
echo "$files" | xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p "$database" 2> >(grep -v 'warnings generated' >&2)
