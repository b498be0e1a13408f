#!/bin/sh
# Runs the ledger's tests, and those of memory limits, on a kernel that counts memory by cgroup v2, wherever cgroup v1 has the
# memory controller: under User Mode Linux (Debian's package user-mode-linux; no root, no KVM), whose root is this machine's.
# Tests with several ranks do not run there.
#   sh tests/operations/cgroup2.sh [PYTEST ARGUMENTS…]
ledger=tests/operations/test_ledger.py budget=tests/models/test_host_budget.py
default="$ledger::test_its_peaks_are_the_kernels_within_two_percent $budget --deselect $budget::test_a_load_that_can_not_fit_reads_nothing"
if [ "$$" != 1 ]; then
  here=$(cd "$(dirname "$0")/../.." && pwd) kept=$(mktemp -d)
  printf '%s\n' "$here" "${*:-$default}" "$kept" >"$kept/asked"
  linux.uml rootfstype=hostfs rootflags=/ rw mem=3G init="$here/tests/operations/cgroup2.sh" asked="$kept/asked" \
    con=null con0=fd:0,fd:1 quiet </dev/null
  exit "$(cat "$kept/status" 2>/dev/null || echo 1)"
fi
{ read -r here; read -r arguments; read -r kept; } <"$asked"
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 none /sys/fs/cgroup
mkdir -p /dev/shm && mount -t tmpfs none /dev/shm
ip link set lo up
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
cd "$here" || exit
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root OMP_NUM_THREADS=1 PYTHONPATH="$here/src"
echo "Linux $(uname -r), cgroup v2 with: $(cat /sys/fs/cgroup/cgroup.controllers)"
mkdir /sys/fs/cgroup/job
(echo 0 >/sys/fs/cgroup/job/cgroup.procs
.venv/bin/python -c 'from shardwise.operations.ledger import Sources; s = Sources(); print(s.cgroup, s.record(s.look()))')
# shellcheck disable=SC2086 # several arguments
.venv/bin/python -m pytest -q -p no:cacheprovider $arguments
echo $? >"$kept/status"
sync
echo o >/proc/sysrq-trigger
sleep 9
