#!/usr/bin/env bash
# Checks the form of the sources. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'END'
usage: tests/lint.sh [--fix]

Checks the form of what is in the tree and says what is wrong with it; exits with 1 if anything is.

  C++      clang-format-14 with .clang-format
  proto    buf lint with proto/buf.yaml (buf is installed from PyPI into build/lint-venv)
  Python   every file compiles
  shell    shellcheck

  --fix    let clang-format rewrite the files instead of complaining
  --help   this text

The tools come with `deploy/setup.sh --dev`. PYTHON names the interpreter to use (default /usr/bin/python3).
END
}

readonly BUF_VERSION=1.73.0
readonly SOURCE_DIRS=(common router expert_server client tests)
failed=false

# check NAME COMMAND...: runs a check and goes on to the next whatever it says.
check() {
  local name=$1
  shift
  if "$@"; then
    echo "lint: $name ok"
  else
    echo "lint: $name FAILED" >&2
    failed=true
  fi
}

# need PROGRAM: false, with the way out, where it is not installed.
need() {
  command -v "$1" >/dev/null && return
  echo "lint: $1 is not installed; run deploy/setup.sh --dev" >&2
  return 1
}

# sources PATTERN...: the matching files of ours, NUL-separated.
sources() {
  local pattern names=()
  for pattern in "$@"; do names+=(-o -name "$pattern"); done
  find "${SOURCE_DIRS[@]}" -name build -prune -o -type f '(' "${names[@]:1}" ')' -print0
}

check_cpp() {
  need clang-format-14 && sources '*.cc' '*.h' | xargs -0r clang-format-14 "${format_args[@]}"
}

check_proto() {
  local buf=build/lint-venv/bin/buf
  if [[ $("$buf" --version 2>/dev/null) != "$BUF_VERSION" ]]; then
    "${PYTHON:-/usr/bin/python3}" -m venv build/lint-venv &&
      build/lint-venv/bin/pip install -q --disable-pip-version-check "buf-bin==$BUF_VERSION" || return
  fi
  "$buf" lint proto
}

check_python() {
  # In memory: compileall would leave its output beside the sources.
  sources '*.py' | xargs -0r "${PYTHON:-/usr/bin/python3}" -c '
import sys
for path in sys.argv[1:]:
    with open(path, "rb") as source:
        compile(source.read(), path, "exec")
'
}

check_shell() {
  need shellcheck && shellcheck deploy/*.sh tests/*.sh .ci/run
}

format_args=(--dry-run -Werror)
case ${1:-} in
  "") ;;
  --fix) format_args=(-i) ;;
  -h | --help) usage; exit 0 ;;
  *) usage >&2; exit 2 ;;
esac

check "C++ format" check_cpp
check "proto" check_proto
check "Python" check_python
check "shell" check_shell
if $failed; then exit 1; fi
