#!/bin/sh
# SLURM of Debian, unpacked into build/slurm and nothing else, without root. If it can't be had, its tests are skipped.
cd "$(dirname "$0")/../.." && mkdir -p build && cd build || exit 1

slurm() {
    set -- $(apt-get install --simulate --no-install-recommends slurmctld slurmd slurm-client munge | awk '/^Inst/ {print $2}')
    [ $# -gt 0 ] || return 1
    mkdir -p slurm.debs && (cd slurm.debs && apt-get download "$@") || return 1
    for package in slurm.debs/*.deb; do dpkg-deb --extract "$package" slurm.part || return 1; done
    mv slurm.part slurm && rm -r slurm.debs
}
if command -v slurmctld >/dev/null || [ -d slurm ]; then
    :
elif ! command -v apt-get >/dev/null; then
    echo "SLURM is left out: there is no apt-get"
else
    rm -rf slurm.part slurm.debs
    slurm || echo "SLURM is left out: apt-get failed; apt-get update may help"
fi
