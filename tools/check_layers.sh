#!/usr/bin/env bash
# Fails on an include that goes against the one-way edges between the folders:
#   kernels → common; data → common; coordinator → common; worker → kernels, data, common; tools, tests → all.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0
check() {  # folder, folders that it may include
  local folder=$1 allowed=$2 found
  found=$(git grep -nE '^#include "(common|kernels|data|coordinator|worker|tools|tests)/' -- "$folder" |
    grep -vE "#include \"($allowed)/" || true)
  if [[ -n $found ]]; then
    printf '%s may include only %s:\n%s\n' "$folder" "${allowed//|/, }" "$found"
    failed=1
  fi
}
check common 'common'
check kernels 'kernels|common'
check data 'data|common'
check coordinator 'coordinator|common'
check worker 'worker|kernels|data|common'
# The agent starts processes; it knows no training code.
check worker/agent 'worker/agent|common'
exit $failed
