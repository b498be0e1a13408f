"""Pages for people who come from Accelerate and Lightning: their blocks, with what those have saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.docs.blocks import ROOT, after_diff, blocks
from tests.docs.shown import run_and_check

LIGHTNING = "test_migrate.py::test_lightning"


def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without FSDP, in this process."""
    from accelerate import Accelerator
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained("base")
    plain = Accelerator(cpu=True)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)  # trained
    plain.prepare(model, torch.optim.AdamW(model.parameters()))
    plain.save_state("old/checkpoint_12")
    names = {"torch": torch, "path": "base", "step": 5, "loader": DataLoader([1, 2])}
    for block in blocks(ROOT / "docs/migrate/accelerate.md"):
        block = after_diff(block) if block.language == "diff" else block
        if block.language == "python":
            run_and_check(block, block.text, names, block.page, block.line)
    assert names["report"].step == 5
    assert torch.equal(names["model"].lm_head.weight, model.lm_head.weight), "of the old folder"


@pytest.mark.slow
def test_lightning() -> None:
    """All its blocks, with a Trainer and with Fabric, and checkpoints as a Trainer writes them."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs._run_blocks", LIGHTNING, "docs/migrate/lightning.md"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.count("docs/migrate/lightning.md:") == 4
