#!/usr/bin/env bash
# The words of EVENSTEP_TEST_REQUIRE: what tests may not be skipped for want of. `namespaces` only where this user may make them (root): networks
# of their own, shaped, and mounts. `ssh` where there is an sshd, too. Of `make test-more`, where scripts/install_services.sh has put them: `s3`,
# an object store; `slurm`; `sshfs`; `disks`, XFS and btrfs by loop devices; `aarch64` where there are a compiler for it and an emulator; `nfs`, a
# kernel with NFS that runs as a process.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

may_make_namespaces() {
  local name="evenstep-probe-$$" result
  [ "$(id -u)" -eq 0 ] && unshare -m mount -t tmpfs none /tmp && ip netns add "$name" || return 1
  ip -n "$name" link add br0 type bridge && ip -n "$name" link add eth0 type veth peer name eth1 &&
    tc -n "$name" qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 100ms
  result=$?
  ip netns del "$name"
  return "$result"
}

has() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" > /dev/null; }

# As tests/python/loop_disk.py mounts them.
may_mount_disks() {
  has mkfs.xfs && has mkfs.btrfs && has mkfs.ext4 && [ -e /dev/loop-control ] && losetup --find &&
    grep -qw xfs /proc/filesystems && grep -qw btrfs /proc/filesystems
}

words=ucx,mpi
[ ! -e build/s3/evenstep.stamp ] || words+=,s3
if may_make_namespaces > /dev/null 2>&1; then
  words+=,namespaces
  # As tests/python/test_run_ssh.py looks for it; a locked account of root lets no key in.
  if has sshd && has ssh && ! grep -q '^root:!' /etc/shadow; then
    words+=,ssh
    if has sshfs && [ -w /dev/fuse ]; then
      words+=,sshfs
    fi
  fi
  if may_mount_disks > /dev/null 2>&1; then
    words+=,disks
  fi
  if has slurmctld && has slurmd && has srun && has munged; then
    words+=,slurm
  fi
fi
if has aarch64-linux-gnu-gcc && has qemu-aarch64-static && has apt-get; then
  words+=,aarch64
fi
if [ -e build/nfs/root.stamp ]; then
  words+=,nfs
fi
echo "$words"
