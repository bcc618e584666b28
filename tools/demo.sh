#!/usr/bin/env bash
# From nothing to a trained model on this machine: installs, builds, trains on the Linux kernel's documentation
# with a coordinator, a data service and two workers, and lets the result write a few lines.
#   tools/demo.sh [--set section.key=value]...     e.g. --set train.steps=200
set -euo pipefail
cd "$(dirname "$0")/.."

tools/install_dependencies.sh --demo
cmake -S . -B build -G Ninja -DMUSTER_TESTS=OFF >/dev/null
cmake --build build -j "$(nproc)" --target muster

run=runs/demo
rm -rf "$run"
build/tools/muster/muster train configs/demo.toml --workers 2 --set run.dir="$PWD/$run" "$@"

echo
echo "A sample of its writing:"
build/tools/muster/muster generate "$run" --prompt "The kernel " --tokens 400 --temperature 0.8
