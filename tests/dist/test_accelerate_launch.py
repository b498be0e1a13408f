"""examples/accelerate_fsdp.py under the real ``accelerate launch``, with its YAML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def launch(out: Path, steps: int, processes: int) -> list[dict[str, float]]:
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(EXAMPLES / "accelerate_fsdp.yaml")),
        *("--dynamo_backend", "eager", "--num_processes", str(processes), "--main_process_port", "0"),
        str(ROOT / "tests/harness/accelerate_on_cpu.py"),
        *(str(EXAMPLES / "accelerate_fsdp.py"), "--out", str(out), "--steps", str(steps)),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def test_the_yaml_of_case_1(tmp_path: Path) -> None:
    first = launch(tmp_path, 5, 2)
    assert [(row["step"], row["ranks"]) for row in first] == [(step, 2) for step in range(5)]
    both = launch(tmp_path, 7, 3)
    assert both[:5] == first
    assert [(row["step"], row["ranks"]) for row in both[5:]] == [(5, 3), (6, 3)], (
        "it goes on where it stopped"
    )
    assert abs(both[5]["loss"] - first[4]["loss"]) < 0.01, "no spike"
