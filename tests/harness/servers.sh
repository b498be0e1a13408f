#!/bin/sh
# Stores that others wrote, into build/servers and nothing else, without root: azurite by npm, and Debian's packages of Ceph, unpacked.
# One that can't be had is left out; its tests are skipped then.
cd "$(dirname "$0")/../.." && mkdir -p build/servers && cd build/servers || exit 1

if ! command -v npm >/dev/null; then
    echo "azurite is left out: there is no npm"
elif [ ! -x node_modules/.bin/azurite-blob ]; then
    npm install --no-fund --no-audit --no-save --prefix . azurite@3.35.0 || echo "azurite is left out: npm failed"
fi

ceph() {
    set -- $(apt-get install --simulate --no-install-recommends radosgw ceph-mon ceph-osd | awk '/^Inst/ && $2 != "sudo" {print $2}')
    [ $# -gt 0 ] || return 1
    mkdir -p debs && (cd debs && apt-get download "$@") || return 1
    for package in debs/*.deb; do dpkg-deb --extract "$package" ceph.part || return 1; done
    mv ceph.part ceph && rm -r debs
}
if command -v radosgw >/dev/null || [ -d ceph ]; then
    :
elif ! command -v apt-get >/dev/null; then
    echo "Ceph is left out: there is no apt-get"
else
    rm -rf ceph.part debs
    ceph || echo "Ceph is left out: apt-get failed; apt-get update may help"
fi
