#!/usr/bin/env bash
# What tests against real services need: an object store with its driver (PyPI, into build/s3), Intel's MPI (PyPI, into build/mpi/intel), and, as root
# where there is apt-get, Slurm, sshfs and the makers of XFS and btrfs from the distribution; a kernel with NFS that runs as a process, unpacked
# into build/nfs (scripts/nfs_guest.sh). Nothing is started: the tests start what they need, in folders of their own. What cannot be had is said, and is no failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
pins=(s3fs moto flask flask-cors)
stamp=build/s3/evenstep.stamp
state="$("$python" -V) $(cksum < constraints.txt) ${pins[*]}"
if [ "$(cat "$stamp" 2> /dev/null)" != "$state" ]; then
  echo "Installing an object store for tests into build/s3: ${pins[*]}"
  rm -rf build/s3
  mkdir -p build
  pins[1]="moto[s3]"
  if "$python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt --target build/s3 "${pins[@]}" > build/s3.log 2>&1; then
    echo "$state" > "$stamp"
  else
    echo "pip could not (build/s3.log): the tests of object storage are left out"
    rm -rf build/s3
  fi
fi

if [ "$(uname -m)" = x86_64 ] && [ ! -x build/mpi/intel/bin/mpirun ]; then
  echo "Installing Intel's MPI for tests into build/mpi/intel"
  if ! scripts/install_mpi.sh intel impi-rt > build/mpi-intel.log 2>&1; then
    echo "pip could not (build/mpi-intel.log): groups over Intel's MPI are not tested"
    rm -rf build/mpi/intel
  fi
fi

# The packages' own services do not begin. Under systemd only policy-rc.d is asked; one that is there already stays, and decides.
keep_services_down() {
  export RUNLEVEL=1
  if [ -d /run/systemd/system ] && (set -C && printf '#!/bin/sh\nexit 101\n' > "$policy") 2> /dev/null; then
    trap 'rm -f "$policy"' EXIT
    chmod 755 "$policy"
  fi
}

policy=/usr/sbin/policy-rc.d
has() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" > /dev/null; }
missing=()
has slurmctld || missing+=(slurmctld)
has slurmd || missing+=(slurmd)
has srun || missing+=(slurm-client)
has munged || missing+=(munge)
has sshfs || missing+=(sshfs)
has sshd || missing+=(openssh-server)
has mkfs.xfs || missing+=(xfsprogs)
has mkfs.btrfs || missing+=(btrfs-progs)
if [ "${#missing[@]}" -gt 0 ]; then
  install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
  if [ "$(id -u)" -ne 0 ] || ! has apt-get; then
    echo "For the tests of Slurm, sshfs and disks that share, root installs: ${install[*]}"
  else
    echo "Installing for tests: ${missing[*]}"
    keep_services_down
    if ! DEBIAN_FRONTEND=noninteractive "${install[@]}" > build/services.log 2>&1; then
      echo "apt-get could not (build/services.log; apt-get update?): the tests of Slurm, sshfs and disks that share are left out"
    fi
  fi
fi

if [ ! -e build/nfs/root.stamp ]; then
  echo "Unpacking for tests, in build/nfs: a kernel with NFS"
  scripts/nfs_guest.sh --fetch || echo "It could not be had: the tests of NFS are left out"
fi
