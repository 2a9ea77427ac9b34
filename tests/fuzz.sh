#!/usr/bin/env bash
# Fuzzes what reads bytes of strangers. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'END'
usage: tests/fuzz.sh [--seconds N] [--grow]

Builds the fuzzers (preset `fuzz`) and runs each from its committed corpus, tests/fuzz/corpus/<target>. What each
one feeds its bytes to, tests/fuzz/targets.h says. Fails if

  an input crashes, is slow, or takes too much memory: it is kept in build/fuzz/artifacts
  a corpus does not reach twice the edges of its seeds, which are hand-made inputs of tests/fuzz/make_seeds.py:
      safetensors  all, valid and hostile
      config       all, valid and hostile
      dispatch     the valid requests; refused ones and replies get through the router, where most edges are
      forward      the smallest one: the other valid ones get through the router
      (edges: of our code and of what it has inlined, without what sets a target up; with both sanitizers)
  a corpus does not reach more edges than all hand-made inputs of its target
  the bug of tests/fuzz/planted_bug.cc is not found

  --seconds N  how long each fuzzer runs (default 60)
  --grow       first fuzz, then write what was found into the corpora, minimised
  --help       this text

An input that crashed, once its bug is fixed, goes to tests/fuzz/regressions/<target>; the unit test
fuzz_corpus_test runs all committed inputs in every build.
END
}

readonly DATA=tests/fuzz BUILD=build/fuzz TARGETS=(safetensors config dispatch forward)
readonly PLANTED_SECONDS=120
readonly LIMITS=(-timeout=5 -rss_limit_mb=1024 -malloc_limit_mb=64)
seconds=60 grow=false

fail() {
  echo "fuzz: $*" >&2
  exit 1
}

# seeds TARGET: the folder of the inputs that its corpus is compared with.
seeds() {
  case $1 in
    safetensors | config) echo "$BUILD/inputs/all/$1" ;;
    dispatch) echo "$BUILD/inputs/valid/$1" ;;
    forward) echo "$BUILD/inputs/smallest/$1" ;;
  esac
}

# dictionary TARGET: the option that names it.
dictionary() {
  case $1 in
    dispatch | forward) echo "-dict=$DATA/message.dict" ;;
    *) echo "-dict=$DATA/$1.dict" ;;
  esac
}

# fuzz TARGET FOLDER...: what is found goes to the first folder.
fuzz() {
  local target=$1 log=$BUILD/$1.log
  shift
  if ! "$BUILD/bin/${target}_fuzzer" "${LIMITS[@]}" "$(dictionary "$target")" -max_total_time="$seconds" \
    -print_final_stats=1 -artifact_prefix="$BUILD/artifacts/$target-" "$@" >"$log" 2>&1; then
    grep -vE '^#[0-9]' "$log" | tail -n 60 >&2
    echo "fuzz: $target: FAILED; the input is in $BUILD/artifacts, the whole log is $log" >&2
    return 1
  fi
  echo "fuzz: $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs, no crash"
}

# fuzz_all: every target, as many at a time as there are processors.
fuzz_all() {
  local target pid pids=() failed=false
  for target in "${TARGETS[@]}"; do
    while [[ $(jobs -rp | wc -l) -ge $(nproc) ]]; do wait -n || true; done
    mkdir -p "$BUILD/found/$target" "$DATA/regressions/$target"
    fuzz "$target" "$BUILD/found/$target" "$DATA/corpus/$target" "$DATA/regressions/$target" \
      "$BUILD/inputs/all/$target" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=true; done  # also those that ended long ago
  if $failed; then fail "a fuzzer failed"; fi
}

# edges TARGET FOLDER: how many its files reach.
edges() {
  local log=$BUILD/edges.log count
  "$BUILD/bin/$1_fuzzer" "${LIMITS[@]}" -runs=0 -artifact_prefix="$BUILD/artifacts/$1-" "$2" >"$log" 2>&1 ||
    { cat "$log" >&2; fail "$1: an input of $2 crashes"; }
  count=$(sed -n 's/^#.*DONE *cov: \([0-9]*\) .*/\1/p' "$log")
  [[ -n $count ]] || { cat "$log" >&2; fail "$1: libFuzzer does not say how many edges $2 reaches"; }
  echo "$count"
}

check_corpora() {
  local target seeds all corpus
  for target in "${TARGETS[@]}"; do
    seeds=$(edges "$target" "$(seeds "$target")")
    all=$(edges "$target" "$BUILD/inputs/all/$target")
    corpus=$(edges "$target" "$DATA/corpus/$target")
    echo "fuzz: $target: the corpus reaches $corpus edges, its seeds $seeds, all hand-made inputs $all"
    [[ $corpus -ge $((2 * seeds)) && $corpus -gt $all ]] || fail "$target: grow the corpus (--grow)"
  done
}

planted_bug() {
  local fuzzer=$BUILD/bin/planted_bug_fuzzer log=$BUILD/planted_bug.log found=$BUILD/found/planted_bug start=$SECONDS
  rm -rf "$found"  # what an earlier call has found would help
  mkdir -p "$found"
  "$fuzzer" -runs=0 "$DATA/corpus/dispatch" >"$log" 2>&1 || fail "the planted bug is reached without fuzzing: plant it elsewhere, see $log"
  if "$fuzzer" "${LIMITS[@]}" "$(dictionary dispatch)" -max_total_time="$PLANTED_SECONDS" \
    -artifact_prefix="$found/" "$found" "$DATA/corpus/dispatch" >"$log" 2>&1 ||
    ! grep -q 'heap-buffer-overflow' "$log"; then
    tail -n 30 "$log" >&2
    fail "the planted bug was not found in $PLANTED_SECONDS s"
  fi
  echo "fuzz: the planted bug was found in $((SECONDS - start)) s"
}

# Keeps, of the corpus and of what was found, about as few inputs as reach all edges.
grow_corpora() {
  local target merged
  for target in "${TARGETS[@]}"; do
    merged=$BUILD/merged/$target
    rm -rf "$merged"
    mkdir -p "$merged" "$DATA/corpus/$target"
    "$BUILD/bin/${target}_fuzzer" "${LIMITS[@]}" -set_cover_merge=1 -use_counters=0 "$merged" "$DATA/corpus/$target" \
      "$BUILD/inputs/all/$target" "$BUILD/found/$target" 2>"$BUILD/merge.log"
    rm -f "$DATA/corpus/$target"/*
    cp "$merged"/* "$DATA/corpus/$target"
    echo "fuzz: $target: $(find "$merged" -type f | wc -l) files, $(cat "$merged"/* | wc -c) bytes"
  done
}

main() {
  while [[ $# -gt 0 ]]; do
    case $1 in
      --seconds)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "--seconds needs a number"
        seconds=$2
        shift
        ;;
      --grow) grow=true ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; fail "unknown argument '$1'" ;;
    esac
    shift
  done
  command -v clang++-14 >/dev/null || fail "clang++-14 is not installed; run deploy/setup.sh --dev"
  cmake --preset fuzz
  cmake --build --preset fuzz
  mkdir -p "$BUILD/artifacts"
  rm -rf "$BUILD/inputs"
  "${PYTHON:-/usr/bin/python3}" "$DATA/make_seeds.py" "$BUILD/inputs"
  if $grow; then
    fuzz_all
    grow_corpora
  fi
  check_corpora
  planted_bug
  if ! $grow; then fuzz_all; fi
  echo "fuzz: passed"
}

main "$@"
