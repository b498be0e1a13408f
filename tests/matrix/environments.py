"""Environments with other versions of some packages, as layers over the project's own.

A layer is a folder that ``pip install --target --no-deps`` fills; an environment's ``.pth`` file names its layers, and after them the
project's packages. torch takes a layer of its own, which environments share. Wheels of torch on PyPI ask for gigabytes of
CUDA libraries, which a machine without a GPU never calls: empty ones are built instead, with the names, symbols and versions
that the wheel's libraries ask for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from .pairs import Pair

__all__ = ["PLACE", "environment", "python_of"]

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "matrix"


def python_of(pair: Pair) -> Path:
    """The interpreter of an environment that :func:`environment` has made."""
    return Path(sys.executable) if not pair.pins else PLACE / pair.name / "bin" / "python"


def environment(pair: Pair) -> Path:
    """The interpreter of the pair's environment, which is made where it isn't there yet. Needs PyPI, and gcc for torch."""
    python = python_of(pair)
    done = PLACE / pair.name / ".done"
    if not pair.pins or (done.is_file() and done.read_text() == repr(pair)):
        return python
    others = {name: version for name, version in pair.pins.items() if name != "torch"}
    layers = [_layer(f"{pair.name}-packages", others)]
    if "torch" in pair.pins:
        version = pair.pins["torch"]
        layers.append(_layer(f"torch-{version or 'newest'}", {"torch": version}))
        _empty_cuda(layers[-1] / "torch" / "lib")
    home = PLACE / pair.name
    venv.create(home, clear=True, symlinks=True)
    base = sysconfig.get_path("purelib")
    own = next((home / "lib").glob("python*")) / "site-packages"
    lines = [*map(str, layers), f"import site; site.addsitedir({base!r})"]
    (own / "layers.pth").write_text("".join(f"{line}\n" for line in lines))
    for script in Path(sys.executable).parent.iterdir():
        # accelerate, torchrun, shardwise, ...
        if script.is_file() and not (home / "bin" / script.name).exists():
            text = script.read_bytes()
            if text.startswith(b"#!" + sys.executable.encode()):
                copy = home / "bin" / script.name
                copy.write_bytes(text.replace(sys.executable.encode(), str(python).encode(), 1))
                copy.chmod(0o755)
    done.write_text(repr(pair))
    return python


def _layer(name: str, pins: dict[str, str | None]) -> Path:
    """The folder of a layer, filled where it isn't."""
    layer = PLACE / "layers" / name
    done = layer / ".done"
    wanted = [f"{package}=={version}" if version else package for package, version in pins.items()]
    if not done.is_file() or done.read_text() != repr(wanted):
        shutil.rmtree(layer, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*command, "--no-deps", "--target", str(layer), *wanted], check=True)
        shutil.rmtree(layer / "bin", ignore_errors=True)
        done.write_text(repr(wanted))
    return layer


#: Functions that give the text of an error. torch calls them, makes an exception of the text, and catches it where it only
#: asks whether something is so; a number in place of the text would be taken for its address.
_TEXTS = re.compile("GetError(String|Name)|getErrorString|GetErrorEnum")
#: Libraries whose symbols have no versions: whatever begins so is theirs.
_PREFIXES = {
    "libnccl.so.2": "nccl",
    "libcufile.so.0": "cuFile",
    "libcusparseLt.so.0": "cusparseLt",
    "libcuda.so.1": "cu[A-Z]",
    "libnvshmem_host.so.3": "nvshmem",
}


def _empty_cuda(place: Path) -> None:
    """Build the CUDA libraries that torch's own in ``place`` ask for, without contents. Each function answers 100: no device."""
    libraries = sorted(place.glob("*.so*"))
    present = {library.name for library in libraries}
    needed: dict[str, set[str]] = {}  # library → versions of its symbols
    undefined: set[str] = set()
    for library in libraries:
        shown = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
        for name in re.findall(r"NEEDED\s+(\S+)", shown):
            if name not in present and re.match(r"lib(cu|nv|nccl)", name):
                needed.setdefault(name, set())
        for name, listed in re.findall(r"required from (\S+):\n((?:\s+0x.*\n)*)", shown):
            if name in needed:
                needed[name] |= {line.split()[3] for line in listed.splitlines()}
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        )
        undefined |= {line.split()[-1] for line in listed.stdout.splitlines() if line.split()}
    symbols: dict[str, set[str]] = {}  # version → symbols
    for symbol, version in (re.split("@+", one) for one in undefined if "@" in one):
        symbols.setdefault(version, set()).add(symbol)
    for name, versions in sorted(needed.items()):
        exported = {symbol for version in versions for symbol in symbols.get(version, ())}
        if prefix := _PREFIXES.get(name):
            exported |= {symbol for symbol in undefined if "@" not in symbol and re.match(prefix, symbol)}
            if name == "libcuda.so.1":
                exported = {symbol for symbol in exported if not symbol.startswith("cuFile")}
        functions = [
            f'const char *{symbol}(void) {{ return "no CUDA device"; }}'
            if _TEXTS.search(symbol)
            else f"long {symbol}(void) {{ return 100; }}"
            for symbol in sorted(exported)
        ]
        source, script = place / f"{name}.c", place / f"{name}.map"
        source.write_text("\n".join(["long shardwise_empty(void) { return 100; }", *functions]))
        groups = [
            f"{version} {{ global: {' '.join(f'{s};' for s in sorted(symbols.get(version, ()))) or 'shardwise_empty;'} }};"
            for version in sorted(versions)
        ]
        script.write_text("\n".join(groups) or "{ global: *; };")
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", place / name, source]
        subprocess.run([*command, f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"], check=True)
        source.unlink()
        script.unlink()
