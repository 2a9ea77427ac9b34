#!/usr/bin/env bash
# Builds ExpertMesh and runs its tests. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'END'
usage: tests/run.sh [--reference] [--full] [--preset NAME]

Builds ExpertMesh and runs its tests, a few minutes after the build. One line per group at the end says what
ran; the exit code is 0 if all of it passed.

  build         the preset, into build/<preset>
  unit          C++: gating, permutation, numbers, safetensors, ... (ctest label `unit`)
  integration   C++: clusters of real processes (all other ctest labels, but `full`)
  python        the Python client against a real cluster; no torch needed
  fault         real processes that are killed, stopped, misused and started in any order

  --reference   also `torch`: ExpertMesh inside transformers' own models. Installs the packages of
                tests/requirements-reference.txt, torch among them (1 to 3 GB), into build/reference-venv
  --full        also what takes long: `full` (ctest label `full`), `fault full` (those marked `full`) and
                `clean_machine` (tests/clean_machine.sh)
  --preset NAME a preset of CMakePresets.json: release (default) or asan
  --help        this text

Python packages go into virtual environments below build/, made on the first run and kept. pip gets them from
wherever this machine's pip is set up to. PYTHON names the interpreter (default /usr/bin/python3).

One test by hand:
  build/release/bin/gate_test --gtest_filter='*Tie*'
  EXPERTMESH_BIN=$PWD/build/release/bin build/test-venv/bin/pytest tests/integration/python -k forward
END
}

readonly PYTHON=${PYTHON:-/usr/bin/python3} PYTHON_TESTS=tests/integration/python
readonly TEST_SECONDS=300 PYTEST_SECONDS=1200  # of one ctest program, of all tests of one pytest call
preset=release reference=false full=false
summary=() failed=false

fail() {
  echo "run: $*" >&2
  exit 2
}

# group NAME COMMAND...: runs it and goes on to the next group whatever comes of it. What the command
# writes to $detail becomes part of the group's line in the summary.
group() {
  local name=$1 start=$SECONDS code=0 result=passed
  shift
  printf '\n== %s\n' "$name"
  : >"$detail"
  # A subshell outside any condition, so that `set -e` holds inside it; hence, too, group itself is never
  # called in one, and does not return the code.
  set +e
  (set -e; "$@")
  code=$?
  set -e
  if [[ $code -ne 0 ]]; then
    result=FAILED failed=true
  fi
  summary+=("$(printf '%-14s %s  %4d s  %s' "$name" "$result" $((SECONDS - start)) "$(<"$detail")")")
}

not_run() { summary+=("$(printf '%-14s not run  %s' "$1" "$2")"); }

build() {
  cmake --preset "$preset"
  cmake --build --preset "$preset"
}

# run_ctest ARGUMENT...: the tests these select. Counts the cases inside the programs and names those
# that a program skipped, which ctest itself reports as passed.
run_ctest() {
  local code=0 log=build/$preset/Testing/Temporary/LastTest.log skipped
  rm -f "$log"
  ctest --test-dir "build/$preset" --output-on-failure --no-tests=error --timeout "$TEST_SECONDS" "$@" || code=$?
  [[ -f $log ]] || return "$code"
  skipped=$(awk '/: Skipped$/ { getline reason } /^\[  SKIPPED \] .* ms\)$/ { print $4 ": " reason }' "$log")
  echo "$(awk '/^\[==========\] [0-9]+ tests? from .* ran/ { programs++; cases += $2 }
    END { printf "%d programs, %d cases", programs, cases }' "$log")$(
    [[ -z $skipped ]] || echo ", $(wc -l <<<"$skipped") of them skipped")" >"$detail"
  [[ -z $skipped ]] || printf 'skipped inside the programs:\n%s\n' "$skipped"
  return "$code"
}

unit() { run_ctest -L '^unit$' -j "$(nproc)"; }

# One after the other: these start processes of their own and measure time.
integration() { run_ctest -LE '^(unit|full)$'; }

full_ctest() { run_ctest -L '^full$' --no-tests=ignore; }

# prepare_venv FOLDER PIP_ARGUMENT...: a virtual environment with the Python client and these packages. Nothing
# is installed again as long as they and the client's sources stay the same.
prepare_venv() {
  local venv=$1 stamp hash
  shift
  stamp=$venv/expertmesh-installed
  hash=$({ echo "$@"; find client/python proto tests/requirements-reference.txt -type f \
    -not -path 'client/python/build/*' -not -path '*.egg-info/*' -not -name '*.pyc' -print0 |
    sort -z | xargs -0 sha256sum; } | sha256sum)
  [[ $(cat "$stamp" 2>/dev/null) != "$hash" ]] || return 0

  # Tried, not just looked for: an interpreter that was upgraded or removed leaves a broken environment.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv" || fail "'$PYTHON -m venv' failed (see above); deploy/setup.sh installs python3-venv"
  fi
  echo "installing the Python client and its tests' packages into $venv"
  rm -rf client/python/build  # else a module that was removed from the sources would be installed from there
  if ! "$venv/bin/python" -m pip install -q --disable-pip-version-check ./client/python "$@"; then
    cat >&2 <<END
run: pip could not install what the Python tests need into $venv (its message is above):
       ./client/python $*
     and what client/python/pyproject.toml lists under 'requires' and 'dependencies'.
     Without a network, pip needs an index or folder that has these; see what it is set up to use with
       $venv/bin/python -m pip config list
END
    return 1
  fi
  echo "$hash" >"$stamp"
}

# run_pytest VENV ARGUMENT...: a skipped Python test counts as failed, since nothing here depends on the machine.
run_pytest() {
  local venv=$1 code=0 log=$scratch/pytest
  shift
  EXPERTMESH_BIN=$PWD/build/$preset/bin timeout --kill-after=10 "$PYTEST_SECONDS" \
    "$venv/bin/python" -B -m pytest -p no:cacheprovider -q -rfEs "$@" | tee "$log" || code=$?
  if [[ $code -eq 124 ]]; then echo "run: stopped after $PYTEST_SECONDS s" >&2; fi
  tail -n 1 "$log" | tr -d '=' | sed 's/^ *//; s/ in .*//' >"$detail"
  if grep -q '[0-9] skipped' "$detail"; then code=1; fi
  return "$code"
}

python() {
  prepare_venv build/test-venv pytest
  run_pytest build/test-venv "$PYTHON_TESTS" --ignore-glob='*/test_torch*'
}

# fault [PYTEST_ARGUMENT...]
fault() {
  prepare_venv build/test-venv pytest
  run_pytest build/test-venv tests/fault "$@"
}

torch() {
  prepare_venv build/reference-venv -r tests/requirements-reference.txt
  run_pytest build/reference-venv "$PYTHON_TESTS"/test_torch*.py
}

main() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --reference) reference=true ;;
      --full) full=true ;;
      --preset)
        [[ $# -gt 1 ]] || fail "--preset needs a name"
        preset=$2
        shift
        ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; fail "unknown argument '$1'" ;;
    esac
    shift
  done
  command -v cmake >/dev/null || fail "cmake is not installed; run deploy/setup.sh"
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  detail=$scratch/detail

  group build build
  if $failed; then
    not_run "everything else" "(the build failed)"
  else
    group unit unit
    group integration integration
    group python python
    group fault fault
    if $reference; then group torch torch; else not_run torch "(--reference)"; fi
    if $full; then
      group full full_ctest
      group "fault full" fault -m full
      group clean_machine tests/clean_machine.sh
    else
      not_run full "(--full)"
      not_run "fault full" "(--full)"
      not_run clean_machine "(--full)"
    fi
  fi

  printf '\n== summary, %s, %d s\n' "$preset" "$SECONDS"
  printf '%s\n' "${summary[@]}"
  if $failed; then
    echo "run: FAILED"
    exit 1
  fi
  echo "run: all groups passed"
}

main "$@"
