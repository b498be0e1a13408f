"""``make gpu-check``: on a GPU where there is one; and its mechanics on the simulated device and on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import image
from tests.gpu.devices import waits_in
from tests.gpu.run import summary
from tests.harness.process import ROOT, worker_env

#: What an image with torch need not have.
NOT_IN_IMAGES = (
    *(
        "pytest",
        "_pytest",
        "transformers",
        "huggingface_hub",
        "accelerate",
        "peft",
        "xxhash",
        "click",
        "rich",
        "hypothesis",
    ),
)
_SITE = f"""
import sys
from importlib.machinery import PathFinder

class Fewer(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {set(NOT_IN_IMAGES)!r}:
            return super().find_spec(name, path, target)

sys.meta_path = [Fewer if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(out: Path, *options: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The script as a user of a clone starts it: nothing of shardwise is installed for it."""
    paths = os.pathsep.join(filter(None, (path, str(ROOT / "src"))))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out), *options],
        env={**worker_env(), "PYTHONPATH": paths, **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
    )


def found(out: Path, name: str) -> Any:
    return json.loads((out / f"{name}.json").read_text())


def statuses(out: Path) -> dict[str, str]:
    return {name: summary(outcomes)[0] for name, outcomes in found(out, "checks")["checks"].items()}


def test_waits_in_a_trace() -> None:
    names = [
        "aten::copy_",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cudaEventSynchronize",
        "cudaDeviceSynchronize",
    ]
    assert waits_in(names) == {"streams": 1, "events": 1}
    assert waits_in(["hipMemcpyAsync"]) == {"streams": 0, "events": 0}
    assert waits_in(["aten::copy_"]) is None, "the driver lets nothing be traced"


def test_an_image_of_now_is_complete() -> None:
    assert image.complete() == []
    assert image.transformers_problem() is None


@pytest.mark.nightly
def test_without_a_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gpu-check: torch sees no GPU here, so there is nothing to check\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "checks")
    if not (tmp_path / "checks.json").exists() and done.returncode == 0:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("simgpu")
def test_on_the_simulated_device(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "simgpu", "--short")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    skipped = {name for name, status in statuses(tmp_path).items() if status != "ok"}
    assert skipped <= {"memory of the device"}
    cells = {(c["model"], c["layout"], c["ranks"]): c["peers"] for c in found(tmp_path, "load")["cells"]}
    assert cells.keys() == {
        ("dense", "dim 0", 1),
        ("dense", "dim 0", 2),
        ("moe", "dim 0", 2),
        ("dense", "dim 1", 2),
    }
    for peers in cells.values():
        measured = {name: peer for name, peer in peers.items() if "rounds" in peer}
        assert measured.keys() >= {"shardwise", "host-to-device copy", "transformers device_map, whole"}
        assert all(peer["different_from_ours"] == [] for peer in measured.values())
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# 2 × simulated accelerator")
    assert "| resume in new processes that see one device each | ok | visible 1 |" in report
    assert "DOES NOT HOLD" not in report


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("simgpu")
def test_on_one_simulated_device(tmp_path: Path) -> None:
    """One process has it, then two share it."""
    done = run(tmp_path, "--device", "simgpu", "--short", SIMGPU_DEVICES="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    skipped = {name for name, status in statuses(tmp_path).items() if status != "ok"}
    shared = ", two processes on one device"
    assert skipped <= {
        *("memory of the device", f"memory of the device{shared}", "strategies"),
        *("save from two devices", f"save from two devices{shared}"),
    }
    cells = {(c["model"], c["layout"], c["ranks"]) for c in found(tmp_path, "load")["cells"]}
    assert cells == {("dense", "dim 0", 1), ("moe", "dim 0", 1), ("dense", "dim 0", 2)}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("simgpu")
def test_under_an_images_own_python(tmp_path: Path) -> None:
    """torch, safetensors and numpy alone."""
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    out = tmp_path / "out"
    done = run(out, "--device", "simgpu", "--short", path=str(tmp_path))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    device = found(out, "load")["device"]
    assert device["transformers"] == "transformers is not installed"
    assert device["stand-ins"] == ["xxhash is not installed: blake2b of hashlib stands in, slower"]
    skipped = {name for name, status in statuses(out).items() if status != "ok"}
    assert skipped - {"memory of the device"} == {"mixture of experts"}
    assert {cell["model"] for cell in found(out, "load")["cells"]} == {"linear"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_on_the_cpu(tmp_path: Path) -> None:
    """The benchmark's mechanics, with the loaders that the simulated device can't have."""
    done = run(tmp_path, "--device", "cpu", "--short", "--only", "load")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    for cell in found(tmp_path, "load")["cells"]:
        measured = {name for name, peer in cell["peers"].items() if "rounds" in peer}
        assert measured >= {"shardwise", "safetensors load_file, whole"}
        assert ("torch DCP" in measured) is (cell["model"] != "moe")
