#!/bin/sh
# Ray Train into build/ray, an environment of its own that sees the packages of this one (sh tests/launchers/install_ray.sh [PYTHON]).
# Nothing of this environment is changed: what it has, pip finds and leaves as it is. If Ray can't be had, its tests are skipped.
cd "$(dirname "$0")/../.." || exit 1
python=${1:-.venv/bin/python}
[ -x build/ray/bin/python ] && build/ray/bin/python -c "import ray.train.torch" 2>/dev/null && exit 0
mkdir -p build && rm -rf build/ray && "$python" -m venv build/ray || exit 1
here=$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
there=$(build/ray/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "import site; site.addsitedir('$here')" >"$there/shardwise-packages.pth"
build/ray/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "ray[train]==2.60.0" ||
    echo "Ray is left out: pip failed"
