#!/usr/bin/env bash
# From a fresh clone to a running cluster that is checked. See --help.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  cat <<'END'
usage: deploy/quickstart.sh [--no-setup]

From a fresh clone to a running cluster whose answers are checked, on a machine without a GPU:

  1. installs the packages that are missing (deploy/setup.sh, the only step that may need root)
  2. builds ExpertMesh into build/release
  3. starts a router and three expert servers on free ports of this machine, with the small OLMoE model
     of the tests
  4. sends every MoE layer real activations of that model and checks the answers against the recorded
     ones and, bit for bit, against one process that holds all experts
  5. shows the state of the cluster and stops it

Ends with "quickstart: all checks passed" and exit code 0, or says what went wrong and where the log is.

  --no-setup   leave out step 1: build with what is installed
  --help       this text
END
}

readonly MODEL=tests/golden/tiny-olmoe BIN=build/release/bin
readonly LOGS=build/quickstart
readonly SERVE_LOG=$LOGS/serve.log BUILD_LOG=$LOGS/build.log
readonly START_SECONDS=60 STOP_SECONDS=20
serve_pid=

say() { printf '\n== %s\n' "$*"; }

fail() {
  echo "quickstart: $*" >&2
  exit 1
}

# show COMMAND...: prints a command as one could type it, and runs it.
show() {
  echo "\$ $*"
  "$@"
}

running() { kill -0 "$serve_pid" 2>/dev/null; }

# Whatever happened, the cluster does not stay behind. `serve` stops its processes on SIGTERM; its whole
# process group is killed only where it did not.
cleanup() {
  [[ -n $serve_pid ]] || return 0
  kill -TERM "$serve_pid" 2>/dev/null || true
  wait_for_exit || true
  kill -KILL -- "-$serve_pid" 2>/dev/null || true
}

wait_for_exit() {
  local i
  for ((i = 0; i < STOP_SECONDS * 10; i++)); do
    running || return 0
    sleep 0.1
  done
  return 1
}

build() {
  echo "\$ cmake --preset release && cmake --build --preset release --target programs   (log: $BUILD_LOG)"
  { cmake --preset release && cmake --build --preset release --target programs; } >"$BUILD_LOG" 2>&1 ||
    { tail -n 30 "$BUILD_LOG" >&2; fail "the build failed; all of its output is in $BUILD_LOG"; }
}

# Starts the cluster and sets `address`, which `serve` prints once all servers have registered.
start_cluster() {
  echo "\$ $BIN/expertmesh serve --model $MODEL --servers 3 --port 0   (log: $SERVE_LOG)"
  # A process group of its own, so that Ctrl-C reaches this script first and the shutdown stays orderly.
  set -m
  "$BIN/expertmesh" serve --model "$MODEL" --servers 3 --port 0 >"$SERVE_LOG" 2>&1 &
  serve_pid=$!
  set +m
  local i
  for ((i = 0; i < START_SECONDS * 10; i++)); do
    address=$(sed -n 's/^ready \([^ ]*:[0-9]*\)$/\1/p' "$SERVE_LOG")
    if [[ -n $address ]]; then return; fi
    running || break
    sleep 0.1
  done
  tail -n 30 "$SERVE_LOG" >&2
  if running; then
    fail "the cluster was not ready within $START_SECONDS s; its log is $SERVE_LOG"
  fi
  fail "the cluster stopped while starting; its log is $SERVE_LOG"
}

stop_cluster() {
  local code=0
  kill -TERM "$serve_pid"
  wait_for_exit || fail "the cluster still runs $STOP_SECONDS s after SIGTERM; its log is $SERVE_LOG"
  wait "$serve_pid" || code=$?
  serve_pid=
  [[ $code -eq 0 ]] || fail "the cluster stopped with exit code $code instead of 0; its log is $SERVE_LOG"
  echo "stopped, exit code 0"
}

main() {
  local setup=true address=
  case ${1:-} in
    "") ;;
    --no-setup) setup=false ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; fail "unknown argument '$1'" ;;
  esac
  mkdir -p "$LOGS"
  trap cleanup EXIT
  trap 'exit 130' INT TERM HUP

  if $setup; then
    say "1. packages"
    show deploy/setup.sh
  fi

  say "2. build (a few minutes the first time)"
  build

  say "3. a router and three expert servers"
  start_cluster
  echo "ready at $address"

  say "4. every MoE layer against the recorded answers"
  show "$BIN/expertmesh" demo --router "$address" --model "$MODEL" --captured "$MODEL/captured.safetensors" ||
    fail "the demo failed (see above); the cluster's log is $SERVE_LOG"

  say "5. the state of the cluster, and its end"
  show "$BIN/expertmesh" status --router "$address" || fail "status failed; the cluster's log is $SERVE_LOG"
  stop_cluster

  cat <<END

To serve a model of your own:
  $BIN/expertmesh serve --model FOLDER --servers 3
The tests are run by tests/run.sh; logs of this run are in $LOGS/.
quickstart: all checks passed
END
}

main "$@"
