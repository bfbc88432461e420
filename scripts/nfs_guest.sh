#!/usr/bin/env bash
# Tests of checkpoints on a real NFS: a Linux that runs as a process (user-mode Linux) serves a folder, and mounts it as two hosts. Its programs and
# Python are this machine's, read only. Nothing is installed: that kernel, nfs-utils and what else it needs are unpacked in build/nfs. Needs Debian's
# apt-get on x86-64; no KVM, no root. Ends with 77 where something is missing.
# usage: scripts/nfs_guest.sh [PYTEST-WORD…]   (tests/python/nfs_cases.py; EVENSTEP_NFS_BUILD=FOLDER: its C tests of checkpoints first)
#        scripts/nfs_guest.sh --fetch           the packages alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="$PWD/build/nfs"
root="$folder/root"
packages=(user-mode-linux kmod nfs-kernel-server e2fsprogs iproute2)
python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
memory=3072            # MiB
seconds_for_tests=1900 # with all that is fetched before, less than test_nfs.py waits

without() {
  echo "nfs: not run: $1" >&2
  exit 77
}

# Where the guest has memory or a disk of its own in the place of this machine's files.
is_hidden() {
  case "$1/" in
    /tmp/* | /run/* | /dev/* | /mnt/* | /export/* | /nfs/* | /nfs3/*) return 0 ;;
  esac
  return 1
}

check_paths() {
  local each
  local -a paths
  IFS=: read -r -a paths <<< "$PWD:$python:${EVENSTEP_PROGRAM:-}:${EVENSTEP_NFS_BUILD:-}:${PYTHONPATH:-}"
  for each in "${paths[@]}"; do
    [ -n "$each" ] || continue
    if is_hidden "$(realpath -ms "$each")" || is_hidden "$(realpath -m "$each")"; then
      without "$each is below a folder that is the guest's own (/tmp, /run, /dev, /mnt, /export, /nfs, /nfs3)"
    fi
  done
}

command -v apt-get > /dev/null || without "no apt-get"
[ "$(uname -m)" = x86_64 ] || without "another processor's machine"
for name in mount umount nsenter unshare dmesg; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$name" > /dev/null || without "no $name"
done
check_paths

unpack() { # as this machine's files lie, over which these are laid
  local each package
  for each in bin sbin lib lib64; do
    mkdir -p "$root/usr/$each" && ln -s "usr/$each" "$root/$each" || return
  done
  for package in "$folder"/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink --no-same-owner -C "$root" || return
  done
  mv "$root/usr/lib/uml/modules" "$root/usr/lib/modules" || return
  for each in depmod modprobe; do # kmod, by the name that says what it shall do
    ln -s root/usr/bin/kmod "$folder/$each" || return
  done
  LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu" "$folder/depmod" -b "$root" "$(basename "$root"/usr/lib/modules/*)"
}

# These packages even where this machine has them, and what they need and it lacks; apt's own lists and the installed packages stay as they are.
fetch() {
  local apt=(apt-get -qq -y -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder" -o "Dir::Cache::Archives=$folder/archives"
    -o APT::Sandbox::User=root -o Debug::NoLocking=1)
  rm -rf "$folder" && mkdir -p "$folder/lists/partial" "$folder/archives/partial" "$root/usr" && timeout 90 "${apt[@]}" update &&
    timeout 150 "${apt[@]}" install --reinstall --download-only --no-install-recommends "${packages[@]}" && unpack &&
    rm -rf "$folder/archives" "$folder/lists" && echo "${packages[*]}" > "$folder/root.stamp"
}

mkdir -p build
if [ "$(cat "$folder/root.stamp" 2> /dev/null)" != "${packages[*]}" ]; then
  fetch > "$folder.log" 2>&1 || {
    tail -5 "$folder.log" >&2
    without "apt-get could not get ${packages[*]} ($folder.log)"
  }
fi
[ "${1:-}" != --fetch ] || exit 0

work="$(mktemp -d)"
place=""
trap 'rm -rf "$work" "$place"' EXIT

# The guest's memory is a file there that is mapped, to be executed, too.
may_lie_in() {
  [ -w "$1" ] && [ "$(df --output=avail --block-size=1M "$1" | tail -n 1)" -gt "$memory" ] && place="$(mktemp -d -p "$1")" || return 1
  cp "$(type -P true)" "$place/true" && "$place/true"
}
may_lie_in /dev/shm || { rm -rf "$place" && may_lie_in "$PWD/build"; } || without "neither /dev/shm nor build has $memory MiB for the guest's memory"

{ # what the tests there are to have of this environment, and their words
  for name in PATH PYTHONPATH EVENSTEP_PROGRAM EVENSTEP_TEST_INSTALLED EVENSTEP_NFS_BUILD; do
    [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
  done
  printf 'tools=%q python=%q\ncd %q\n' "$root" "$python" "$PWD"
  printf 'words=('
  [ $# -eq 0 ] || printf '%q ' "$@"
  printf ')\n'
} > "$work/environment"
truncate -s 4G "$work/disk"

TMPDIR="$place" timeout --foreground --kill-after=20 "$seconds_for_tests" "$root/usr/bin/linux.uml" "mem=${memory}M" root=/dev/root rootfstype=hostfs \
  rootflags=/ ro "ubd0=$work/disk" quiet con=null con0=null,fd:1 "init=$PWD/scripts/nfs_guest_tests.sh" "NFS_GUEST=$work/environment" \
  < /dev/null 2>&1 | tee "$work/log"
grep -q "^NFS GUEST: EVERY TEST PASSED" "$work/log"
