"""Compiling simgpu.cpp: once for each version of it, of torch and of Python, whichever process is first."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.harness.process import ROOT

__all__ = ["MODULE", "built", "what_is_missing"]

MODULE = "simgpu_C"
_SOURCE = Path(__file__).with_name("simgpu.cpp")
#: In the folder that git ignores, so that it lives as long as the checkout.
_CACHE = ROOT / "build" / "simgpu"
#: Without optimization: the compiler is the slow part here.
_FLAGS = ("-std=c++20", "-O0", "-g0", "-w", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={MODULE}")


def what_is_missing() -> str | None:
    """Why this machine can't compile it, or None."""
    if shutil.which("g++") is None:
        return "g++ is not installed: the simulated device can't be compiled"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python.h is not installed: the simulated device can't be compiled"
    return None


def built() -> Path:
    """The shared library; about half a minute of one core if it is not there yet. Other processes wait for it."""
    library = _CACHE / f"{_key()}.so"
    if library.is_file():
        return library
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel gives it back, however the holder ends
        if not library.is_file():
            _compile(library)
    return library


def _key() -> str:
    versions = (torch.__version__, str(torch._C._GLIBCXX_USE_CXX11_ABI), sysconfig.get_config_var("SOABI"))
    return hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, versions)).encode()).hexdigest()[:16]


def _compile(library: Path) -> None:
    partial = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = ["g++", *_FLAGS, abi, *includes, str(_SOURCE), "-o", str(partial), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"simgpu.cpp does not compile against torch {torch.__version__}:\n{done.stderr[-4000:]}"
        )
    partial.replace(library)
