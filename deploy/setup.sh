#!/usr/bin/env bash
# Installs the packages that ExpertMesh is built, run and tested with. See --help.
set -euo pipefail

usage() {
  cat <<'END'
usage: deploy/setup.sh [--dev] [--list]

Installs, with apt-get, every package that building, running and testing ExpertMesh needs. Debian 12 is
the reference; newer Debian and Ubuntu releases have the same packages, but for the versions of clang that --dev
names. What is installed already is left
alone, so a second call takes no time and needs neither root nor network.

  --dev    also what changing the code needs: formatter, linters, fuzzers, the clean-machine test
  --list   print the packages, each with its reason, and install nothing
  --help   this text

Run it as root, or as a user who may use sudo. Packages come from wherever this machine's apt is set up to
get them. Nothing else on the machine is changed.
END
}

# One package a line, and what needs it.
packages() {
  cat <<'END'
g++                      the C++20 compiler
cmake                    configures the build
ninja-build              runs it
pkg-config               lets CMake find libraries that have no CMake files of their own
ccache                   makes a rebuild take seconds
libgrpc++-dev            gRPC: every call between client, router and servers
grpc-proto               the standard health service, as a .proto file
protobuf-compiler-grpc   its code generators for C++ and Python
protobuf-compiler        protoc, which runs them
libprotobuf-dev          the messages on the wire
libabsl-dev              Abseil: status values, strings, flags, synchronisation
nlohmann-json3-dev       reads config.json and safetensors headers
libcli11-dev             command line of the programs
libspdlog-dev            logs
libhwy-dev               Highway: vector code for several instruction sets from one source
libssl-dev               SHA-256 of a model's fingerprint
libgtest-dev             GoogleTest, the C++ tests
libgmock-dev             its matchers
python3                  the Python client and its tests
python3-venv             keeps their Python packages inside build/
ca-certificates          lets pip fetch these over TLS
END
}

dev_packages() {
  cat <<'END'
clang-format-14          the format of the C++ code (tests/lint.sh)
clang-14                 the compiler of the fuzzers (tests/fuzz.sh)
libclang-rt-14-dev       libFuzzer and the sanitizers for it
llvm-14                  names functions and lines in their reports
shellcheck               checks the shell scripts (tests/lint.sh)
debootstrap              makes the bare Debian of tests/clean_machine.sh
git                      clones the repository into it
END
}

fail() {
  echo "setup: $*" >&2
  exit 1
}

# missing_of PACKAGE...: prints those that are not installed.
missing_of() {
  local installed package
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null || true)
  for package in "$@"; do
    grep -qx "installed $package" <<<"$installed" || echo "$package"
  done
}

# as_root COMMAND...: with sudo where we are not root.
as_root() {
  if [[ $EUID -eq 0 ]]; then
    "$@"
  else
    sudo "$@"
  fi
}

# apt_get ARGUMENT...: shows what apt-get says only if it fails. Waits for another apt to finish instead of
# failing, and tries a broken download again.
apt_get() {
  local output
  output=$(as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Dpkg::Use-Pty=0 \
    -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" 2>&1) && return
  echo "$output" >&2
  return 1
}

main() {
  local dev=false list=false
  while [[ $# -gt 0 ]]; do
    case $1 in
      --dev) dev=true ;;
      --list) list=true ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; fail "unknown argument '$1'" ;;
    esac
    shift
  done

  local table
  table=$(packages)
  if $dev; then table+=$'\n'$(dev_packages); fi
  if $list; then
    echo "$table"
    exit 0
  fi

  local wanted=() missing=() package _
  while read -r package _; do wanted+=("$package"); done <<<"$table"

  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "$table" >&2
    fail "this is no Debian or Ubuntu (there is no apt-get): install what these packages contain by other means"
  fi
  mapfile -t missing < <(missing_of "${wanted[@]}")
  if [[ ${#missing[@]} -eq 0 ]]; then
    echo "setup: all ${#wanted[@]} packages are installed"
    exit 0
  fi

  echo "setup: ${#missing[@]} of ${#wanted[@]} packages are missing: ${missing[*]}"
  if [[ $EUID -ne 0 ]] && ! command -v sudo >/dev/null; then
    fail "you are not root and there is no sudo; let root run: apt-get update && apt-get install --no-install-recommends ${missing[*]}"
  fi
  echo "setup: installing them (one or two minutes)"
  apt_get update ||
    fail "apt-get update failed (see above): check the network and apt's sources, then run this again"
  apt_get install --no-install-recommends "${missing[@]}" ||
    fail "apt-get install failed (see above): not installed are $(missing_of "${missing[@]}" | tr '\n' ' ')"
  echo "setup: done, ${#missing[@]} packages installed"
}

main "$@"
