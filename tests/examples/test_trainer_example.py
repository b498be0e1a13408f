"""examples/trainer_sft.py under torchrun, as a user runs it: once, and again with more steps, on other ranks, too."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.harness.process import ROOT, worker_env

pytestmark = pytest.mark.nightly


def launch(out: Path, steps: int, processes: int, *options: str) -> tuple[dict[int, float], str]:
    """The loss of each step so far, as the newest checkpoint has it; what was printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *(str(ROOT / "examples/trainer_sft.py"), "--out", str(out), "--steps", str(steps), *options),
    ]
    done = subprocess.run(command, env=worker_env(), timeout=150, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    state = json.loads((out / "run" / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}, said


def test_goes_on_with_other_ranks_and_exports(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, _ = launch(tmp_path, 6, 2)
    assert list(first) == [1, 2, 3, 4, 5, 6]
    again, said = launch(tmp_path, 8, 1)
    assert list(again) == list(range(1, 9))
    assert {step: again[step] for step in first} == first
    assert "exact: no: world size: 2 when saved, 1 now" in said
    assert "global batch size" not in said, "no sample is skipped or repeated"
    assert again[8] < again[1] - 0.3, "it learns"
    assert max(again[7], again[8]) < again[6] + 0.1, "no spike"
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-6", "checkpoint-8"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    AutoTokenizer.from_pretrained(tmp_path / "export")


def test_lora(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    first, _ = launch(tmp_path, 2, 2, "--lora")
    again, said = launch(tmp_path, 4, 2, "--lora")
    assert list(again) == [1, 2, 3, 4]
    assert {step: again[step] for step in first} == first
    assert "not exact" not in said
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft 0.21
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
        model = peft.PeftModel.from_pretrained(base, tmp_path / "export")
    assert any(t.abs().max() > 0 for n, t in model.state_dict().items() if "lora_B" in n)
