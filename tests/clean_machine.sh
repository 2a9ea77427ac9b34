#!/usr/bin/env bash
# Proves that a clean clone works on a bare Debian 12. See --help.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)

usage() {
  cat <<'END'
usage: tests/clean_machine.sh [--worktree] [--keep] [COMMAND...]

Makes a bare Debian 12 in a folder (debootstrap, minbase: no compiler, no Python, no sudo), clones this
repository into it, and runs README's commands there, as root and with an empty environment:

  deploy/quickstart.sh     has to end with "quickstart: all checks passed"
  tests/run.sh             has to end with "run: all groups passed"

Exits with 0 if they do. Removes the folder afterwards, whatever happened.

  COMMAND...   run these instead, each one shell command line
  --worktree   take the files as they are now, with uncommitted changes, instead of a clone of HEAD
  --keep       leave the folder and say where it is
  --help       this text

Needs root, debootstrap and git (deploy/setup.sh --dev), and about 6 GB in TMPDIR (default /var/tmp). The bare
system is kept in /tmp/em-minbase.tar, so that the next run takes it from there; delete the file to
have it made afresh. Debian's mirror, proxies, certificates and pip's index are those of this machine.
END
}

readonly SUITE=bookworm CACHE=/tmp/em-minbase.tar
worktree=false keep=false root=

fail() {
  echo "clean_machine: $*" >&2
  exit 1
}

# timed NAME COMMAND...: says how long it took.
timed() {
  local name=$1 start=$SECONDS
  shift
  "$@"
  echo "clean_machine: $name took $((SECONDS - start)) s"
}

# All mounts live in a namespace of their own (see inside), so nothing of this machine is mounted here;
# --one-file-system is the second lock on that door.
cleanup() {
  [[ -n $root ]] || return 0
  if $keep; then
    echo "clean_machine: left in $root"
  else
    rm -rf --one-file-system "$root"
  fi
}

# Debian's suites as apt on this machine knows them: "MIRROR SUITE COMPONENT" a line.
debian_sources() {
  # shellcheck disable=SC2016  # apt expands these names
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    grep -E " $SUITE(-updates|-security)? main$" | sort -u || true
}

make_base() {
  local mirror
  mirror=$(debian_sources | awk -v suite="$SUITE" '$2 == suite { print $1; exit }')
  # Without a mirror of ours debootstrap takes its own default. Downloaded .debs do not belong in the cache.
  # shellcheck disable=SC2086
  debootstrap --variant=minbase "$SUITE" "$root" $mirror >"$root.log" 2>&1 ||
    { tail -20 "$root.log" >&2; fail "debootstrap failed"; }
  rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb
  tar -C "$root" -cf "$CACHE.$$" . && mv "$CACHE.$$" "$CACHE"
}

unpack_base() { tar -C "$root" -xpf "$CACHE"; }

# What this machine needs to reach the mirror and the package index, it needs in there, too.
copy_settings() {
  local sources path
  sources=$(debian_sources)
  if [[ -n $sources ]]; then
    # Words: "deb MIRROR SUITE COMPONENT".
    printf 'deb %s\n' "${sources//$'\n'/$'\ndeb '}" >"$root/etc/apt/sources.list"
  fi
  apt-config dump | grep '^Acquire::' | grep -v '^Acquire::IndexTargets' >"$root/etc/apt/apt.conf.d/90machine"
  for path in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/xdg/pip /usr/local/share/ca-certificates; do
    [[ -e $path ]] || continue
    mkdir -p "$root${path%/*}"
    rm -rf "${root:?}$path"
    cp -rL "$path" "$root$path"
  done
}

copy_repository() {
  if $worktree; then
    mkdir "$root/root/expertmesh"
    git -C "$repository" ls-files -z --cached --others --exclude-standard |
      while IFS= read -r -d '' file; do
        if [[ -e $repository/$file ]]; then printf '%s\0' "$file"; fi
      done | tar -C "$repository" --null -T - -c | tar -C "$root/root/expertmesh" -x
  else
    git clone -q --no-local "$repository" "$root/root/expertmesh"
  fi
}

# inside COMMAND: runs it in the bare system. The mount and process namespaces end with it: no mount stays
# behind, and no process either, even if this script is killed.
inside() {
  local variable environment=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root)
  for variable in {http,https,no}_proxy {HTTP,HTTPS,NO}_PROXY PIP_{INDEX_URL,EXTRA_INDEX_URL,PROXY,TRUSTED_HOST}; do
    if [[ -n ${!variable:-} ]]; then environment+=("$variable=${!variable}"); fi
  done
  # shellcheck disable=SC2016
  unshare --mount --pid --fork --kill-child --propagation private bash -euc '
    root=$1 command=$2
    shift 2
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec env -i "$@" chroot "$root" bash -c "cd /root/expertmesh && $command"
  ' inside "$root" "$1" "${environment[@]}"
}

# prove COMMAND [LAST_LINE]: runs it inside and checks its exit code and, if given, its last line.
prove() {
  local log="$root/root/log" last
  echo "clean_machine: running $1"
  inside "$1" 2>&1 | tee "$log" || fail "'$1' failed with exit code $?"
  if [[ -n ${2:-} ]]; then
    last=$(tail -n 1 "$log")
    [[ $last == "$2" ]] || fail "'$1' ended with '$last', expected '$2'"
  fi
}

main() {
  local commands=() command program
  while [[ $# -gt 0 ]]; do
    case $1 in
      --worktree) worktree=true ;;
      --keep) keep=true ;;
      -h | --help) usage; exit 0 ;;
      -*) usage >&2; fail "unknown option '$1'" ;;
      *) commands+=("$1") ;;
    esac
    shift
  done
  [[ $EUID -eq 0 ]] || fail "chroot and debootstrap need root"
  for program in debootstrap git unshare; do
    command -v "$program" >/dev/null || fail "$program is not installed; run deploy/setup.sh --dev"
  done

  trap cleanup EXIT
  trap 'exit 130' INT TERM HUP
  root=$(mktemp -d "${TMPDIR:-/var/tmp}/expertmesh-clean.XXXXXX")
  chmod 755 "$root"

  if [[ -f $CACHE && -O $CACHE ]]; then  # nobody else's: it is unpacked as root
    timed "unpacking $CACHE" unpack_base
  else
    timed "debootstrap" make_base
  fi
  copy_settings
  copy_repository

  if [[ ${#commands[@]} -gt 0 ]]; then
    for command in "${commands[@]}"; do timed "$command" prove "$command"; done
  else
    timed deploy/quickstart.sh prove deploy/quickstart.sh "quickstart: all checks passed"
    timed tests/run.sh prove tests/run.sh "run: all groups passed"
  fi
  echo "clean_machine: all commands passed, ${SECONDS} s in all"
}

main "$@"
