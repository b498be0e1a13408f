"""examples/accelerate_fsdp.py under the real ``accelerate launch``, with its YAML."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.object_store import BUCKET, SECRET, S3Server, s3_server

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


#: As the YAML says; inductor needs a C++ compiler on CPU.
COMPILER = "inductor" if shutil.which("g++") else "eager"


def launch(
    out: Path, steps: int, processes: int, compiler: str = COMPILER, server: S3Server | None = None
) -> list[dict[str, float]]:
    """Its losses. Checkpoints lie in the server's bucket, if one is given."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(EXAMPLES / "accelerate_fsdp.yaml")),
        *("--dynamo_backend", compiler, "--num_processes", str(processes), "--main_process_port", "0"),
        str(ROOT / "tests/harness/accelerate_on_cpu.py"),
        *(str(EXAMPLES / "accelerate_fsdp.py"), "--out", str(out), "--steps", str(steps)),
    ]
    store = {}
    if server is not None:
        command += ["--checkpoints", f"s3://{BUCKET}/{out.name}"]
        store = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "AWS_REGION": "us-east-1"}
        store |= {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": SECRET}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"))))
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, **store}
    done = subprocess.run(command, env=env, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


@pytest.mark.slow  # 80 s on two busy cores, most of it in compilers and imports
@pytest.mark.timeout(420)
def test_the_yaml_of_case_1(tmp_path: Path) -> None:
    whole = launch(tmp_path / "whole", 7, 2)
    assert [(row["step"], row["ranks"]) for row in whole] == [(step, 2) for step in range(7)]
    assert launch(tmp_path / "stopped", 5, 2) == whole[:5]
    shutil.copytree(tmp_path / "stopped", tmp_path / "on three")
    assert launch(tmp_path / "stopped", 7, 2) == whole, "as if it never stopped"
    with s3_server(tmp_path) as server:
        assert launch(tmp_path / "store", 5, 2, server=server) == whole[:5]
        assert launch(tmp_path / "store", 7, 2, server=server) == whole
        assert not (tmp_path / "store" / "checkpoints").exists()
        assert "head.json" in "".join(server.keys("store/"))
    three = launch(tmp_path / "on three", 7, 3, "eager")
    assert [(row["step"], row["ranks"]) for row in three[5:]] == [(5, 3), (6, 3)]
    learned = whole[0]["loss"] - whole[5]["loss"]
    for row, expected in zip(three[5:], whole[5:], strict=True):  # the same rows, summed in another order
        assert abs(row["loss"] - expected["loss"]) < 0.02 * learned
