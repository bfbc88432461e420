#!/bin/bash
# The first process of the Linux that scripts/nfs_guest.sh starts: a server of NFS, and two hosts (networks and names of their own) that have mounted
# it at /nfs/a and /nfs/b (NFS 4.2) and at /nfs3/a and /nfs3/b (NFS 3 without locks); then the tests, which stop and start the server.
set -uo pipefail
export HOME=/root LC_ALL=C.UTF-8 PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
server=10.81.0.254
tools="" python="" words=() # of the environment that the script hands over

end() {
  sync
  echo o > /proc/sysrq-trigger
  sleep 60
}
trap end EXIT
must() { "$@" || { echo "NFS GUEST: $* failed" && exit 1; }; }

# The machine's files below, what was unpacked over them, memory on top; this file is run again there.
if [ -z "${NFS_GUEST_INSIDE:-}" ]; then
  # shellcheck source=/dev/null
  source "$NFS_GUEST"
  mount -t proc none /proc && mount -t tmpfs none /mnt && mkdir /mnt/files /mnt/work /mnt/root /mnt/tools
  must "$tools/../modprobe" -d "$tools" overlay
  must mount -t hostfs none /mnt/tools -o "$tools"
  must mount -t overlay -o "lowerdir=/mnt/tools:/,upperdir=/mnt/files,workdir=/mnt/work" none /mnt/root
  cp "$NFS_GUEST" /mnt/root/environment
  NFS_GUEST_INSIDE=1 exec chroot /mnt/root /bin/bash "$0"
fi
# shellcheck source=/dev/null
source /environment
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
mount -t proc none /proc && mount -t sysfs none /sys && mount -t devtmpfs none /dev && mount -t tmpfs none /tmp && mount -t tmpfs none /run
mkdir -p /dev/shm /dev/pts && mount -t tmpfs none /dev/shm && mount -t devpts none /dev/pts && ln -sf /proc/self/fd /dev/fd
ulimit -n 65536
hostname server
ip link set lo up
for module in veth bridge nfsd nfs nfsv3 nfsv4; do must modprobe "$module"; done

must mke2fs -q -F -t ext4 /dev/ubda && mkdir -p /export && must mount -t ext4 /dev/ubda /export
must ip link add br0 type bridge && must ip addr add "$server/24" dev br0 && must ip link set br0 up
number=0
for host in a b; do
  number=$((number + 1))
  must ip netns add "$host"
  must ip link add "to-$host" type veth peer name eth0 netns "$host"
  must ip link set "to-$host" master br0 up
  must ip -n "$host" addr add "10.81.0.$number/24" dev eth0
  ip -n "$host" link set lo up && ip -n "$host" link set eth0 up
done

# The server: its memory of clients in a folder of its own, and a tenth of the usual grace.
rm -rf /var/lib/nfs && mkdir -p /var/lib/nfs/{v4recovery,nfsdcld,sm,sm.bak,rpc_pipefs} /run/rpcbind /run/sendsigs.omit.d
touch /var/lib/nfs/{etab,rmtab,state}
grep -q '^_rpc:' /etc/passwd || echo '_rpc:x:65533:65534::/run/rpcbind:/usr/sbin/nologin' >> /etc/passwd
must mount -t nfsd none /proc/fs/nfsd
mount -t rpc_pipefs none /var/lib/nfs/rpc_pipefs
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
rpcbind -w
nfsdcld
must rpc.mountd -p 20048
echo "/export 10.81.0.0/24(rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure)" > /etc/exports
must exportfs -a
must rpc.nfsd 8

# shellcheck disable=SC2016
as() { # HOST COMMAND…: with its network and its name
  nsenter "--net=/run/netns/$1" unshare -u sh -c 'hostname "$0" && exec "$@"' "$@"
}
for host in a b; do
  mkdir -p "/nfs/$host" "/nfs3/$host"
  must as "$host" mount -t nfs4 -o vers=4.2,hard "$server:/" "/nfs/$host"
  must as "$host" mount -t nfs -o vers=3,nolock,hard,proto=tcp,mountproto=tcp,port=2049,mountport=20048 "$server:/export" "/nfs3/$host"
done
grep ' /nfs' /proc/mounts

result=0
if [ -n "${EVENSTEP_NFS_BUILD:-}" ]; then # C tests make their folders in /dev/shm
  count=0
  mkdir -p /nfs/a/shm && mount --bind /nfs/a/shm /dev/shm
  for test in "$EVENSTEP_NFS_BUILD"/tests/checkpoint/test_*; do
    if [ ! -x "$test" ] || [ ! -f "$test" ]; then continue; fi
    count=$((count + 1))
    echo "== $(basename "$test")"
    timeout 300 "$test" > /tmp/out 2>&1 || { cat /tmp/out && echo "NFS GUEST: $test failed" && result=1; }
    grep -a 'PASSED\|FAILED' /tmp/out
  done
  umount /dev/shm
  [ "$count" -gt 0 ] || { echo "NFS GUEST: no test of checkpoints in $EVENSTEP_NFS_BUILD/tests/checkpoint" && result=1; }
fi
export EVENSTEP_TEST_MORE=1 EVENSTEP_TEST_NFS=1
[ "${#words[@]}" -gt 0 ] || words=(tests/python/nfs_cases.py)
"$python" -m pytest -q -p no:cacheprovider --color=no "${words[@]}" || result=1
dmesg --level=emerg,alert,crit,err | tail -20
[ "$result" = 0 ] && echo "NFS GUEST: EVERY TEST PASSED"
