#!/usr/bin/env bash
# Installs what Muster is built and run with from Debian's packages (Debian 12, or a relative with the same package names).
#   tools/install_dependencies.sh [--checks] [--demo]
# --checks adds the formatter, the linter and what the tests use; --demo adds the demo's corpus.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config git ca-certificates
  libgloo-dev libdnnl-dev libzmq3-dev cppzmq-dev protobuf-compiler libprotobuf-dev
  libboost-dev libboost-program-options-dev libtomlplusplus-dev nlohmann-json3-dev
  libzstd-dev zlib1g-dev libxxhash-dev libsqlite3-dev libspdlog-dev libfmt-dev
)
for option in "$@"; do
  case "$option" in
    --checks) packages+=(libgtest-dev libgmock-dev clang-format clang-tidy iproute2 procps) ;;
    --demo) packages+=(linux-doc-6.1) ;;
    *) echo "usage: $0 [--checks] [--demo]" >&2; exit 2 ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done

# Minimal images tell dpkg to leave documentation out; the demo's corpus is documentation.
keep_docs=()
if [[ " ${packages[*]} " == *" linux-doc-6.1 "* ]]; then
  keep_docs=(-o 'DPkg::Options::=--path-include=/usr/share/doc/linux-doc-6.1/*')
  [[ -d /usr/share/doc/linux-doc-6.1/Documentation ]] || missing+=(linux-doc-6.1)
fi

[[ ${#missing[@]} -eq 0 ]] && exit 0
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo >/dev/null || { echo "run this as root, or install sudo: missing packages ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends --reinstall "${keep_docs[@]}" "${missing[@]}" >/dev/null
