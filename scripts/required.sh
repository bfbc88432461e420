#!/usr/bin/env bash
# The words of EVENSTEP_TEST_REQUIRE: what tests may not be skipped for want of. `namespaces` only where this user may make them (root): networks
# of their own, shaped, and mounts. `ssh` where there is an sshd, too.
set -uo pipefail

may_make_namespaces() {
  local name="evenstep-probe-$$" result
  [ "$(id -u)" -eq 0 ] && unshare -m mount -t tmpfs none /tmp && ip netns add "$name" || return 1
  ip -n "$name" link add br0 type bridge && ip -n "$name" link add eth0 type veth peer name eth1 &&
    tc -n "$name" qdisc add dev eth0 root tbf rate 1gbit burst 256kb latency 100ms
  result=$?
  ip netns del "$name"
  return "$result"
}

words=ucx,mpi
if may_make_namespaces > /dev/null 2>&1; then
  words+=,namespaces
  # As tests/python/test_run_ssh.py looks for it; a locked account of root lets no key in.
  if PATH="$PATH:/usr/sbin:/sbin" command -v sshd > /dev/null && command -v ssh > /dev/null && ! grep -q '^root:!' /etc/shadow; then
    words+=,ssh
  fi
fi
echo "$words"
