#!/usr/bin/env bash
# Installs a build into a temporary folder, moves it, and fails unless it runs from there with its own libraries alone.
#   tools/check_install.sh BUILD_DIR
set -euo pipefail
build=${1:?usage: $0 BUILD_DIR}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --prefix "$scratch/first" --strip >/dev/null
mv "$scratch/first" "$scratch/moved"
strays=$(env -i ldd "$scratch/moved/bin/muster" | grep '=> /' | grep -v "=> $scratch/moved/" |
  grep -vE '^\s*lib(c|m|dl|rt|pthread|resolv|util)\.so' || true)
if [[ -n $strays ]]; then
  printf 'the installed program takes libraries from outside its tree:\n%s\n' "$strays"
  exit 1
fi
[[ -f $scratch/moved/configs/demo.toml ]]
env -i "$scratch/moved/bin/muster" doctor >/dev/null
