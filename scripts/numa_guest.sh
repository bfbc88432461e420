#!/usr/bin/env bash
# Runs the tests of NUMA placement in a guest of QEMU that has two nodes, for machines that have one: 15 seconds, no KVM,
# no root. Needs qemu-system-x86_64 (QEMU: another one and its options), a static busybox (BUSYBOX), and a kernel that can
# be read with what it needs built in (Debian's linux-image-cloud-amd64).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

build="${1:?usage: scripts/numa_guest.sh BUILD_FOLDER KERNEL    (build/dev /boot/vmlinuz-…)}"
kernel="${2:?usage: scripts/numa_guest.sh BUILD_FOLDER KERNEL    (build/dev /boot/vmlinuz-…)}"
read -r -a qemu <<< "${QEMU:-qemu-system-x86_64}"
busybox="${BUSYBOX:-$(command -v busybox)}"
tests=(os/test_os_numa comm/test_comm_nodes)

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
root="$work/root"
mkdir -p "$root"/{bin,dev,proc,sys,tmp}
cp "$busybox" "$root/bin/busybox"
for name in "${tests[@]}"; do
  cp "$build/tests/$name" "$root/bin/"
  ldd "$build/tests/$name" | grep -oE '/[^ ]+' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
  done
done
cat > "$root/init" << 'INIT'
#!/bin/busybox sh
for kind in proc sysfs devtmpfs; do
  case $kind in sysfs) at=/sys ;; devtmpfs) at=/dev ;; *) at=/proc ;; esac
  /bin/busybox mount -t $kind $kind $at
done
failed=0
for test in /bin/test_*; do $test || failed=1; done
[ "$(/bin/busybox cat /sys/devices/system/node/has_memory)" = 0-1 ] || failed=1
[ $failed = 0 ] && echo "EVERY TEST PASSED"
/bin/busybox poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | "$busybox" cpio -o -H newc 2> /dev/null | gzip -1) > "$work/initrd.gz"

timeout 600 "${qemu[@]}" -machine pc -accel tcg,thread=multi -cpu max -smp 4,sockets=2,cores=2 -m 1024 \
  -object memory-backend-ram,id=first,size=512M -object memory-backend-ram,id=second,size=512M \
  -numa node,nodeid=0,cpus=0-1,memdev=first -numa node,nodeid=1,cpus=2-3,memdev=second \
  -kernel "$kernel" -initrd "$work/initrd.gz" -append "console=ttyS0 quiet panic=-1" \
  -nographic -no-reboot -net none < /dev/null | tee "$work/log"
grep -q "EVERY TEST PASSED" "$work/log" && ! grep -q "SKIPPED.*several_nodes" "$work/log"
