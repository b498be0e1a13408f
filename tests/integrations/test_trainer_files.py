"""What lies in ``checkpoint-N`` of an HF Trainer: files of subclasses, and what other programs read there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.format.manifest import MANIFEST_NAME
from tests.harness.models import build_reference
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.integrations import _trainer_files_fns as fns

pytestmark = pytest.mark.needs("trainer")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # below from_pretrained
@pytest.mark.parametrize("world_size", [2, *nightly(1)])
@pytest.mark.nightly
def test_files_of_other_classes_and_from_pretrained(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    build_reference("qwen3-tied").save_pretrained(tmp_path / "hub")
    found = ranks.run_ranks(world_size, fns.train, str(tmp_path / "hub"), str(tmp_path), timeout_s=200)
    for rank in found:
        assert rank["Mine"] == rank["Alone"] == ["checkpoint-2"], "no file of ours beside it"
        assert rank["verified"] == ()
        assert rank["exact"] == (True, ())
    assert not any(p.name.startswith(("_", ".")) for p in (tmp_path / "Mine").iterdir())
    checkpoint = tmp_path / "Mine" / "checkpoint-2"
    for folder in (checkpoint, tmp_path / "export-Mine"):
        assert (folder / "mine.txt").read_text() == "_save"
        assert (folder / "theirs.txt").read_text() == "save_model"
        assert sorted(p.name for p in (folder / "theirs").iterdir()) == [
            f"rank-{r}.txt" for r in range(world_size)
        ]
    assert (tmp_path / "Alone" / "checkpoint-2" / "mine.txt").is_file()
    for folder in (checkpoint, tmp_path / "Alone" / "checkpoint-2", tmp_path / "export-Mine"):
        saved = torch.load(folder / "training_args.bin", weights_only=False)
        assert saved.max_steps == 2
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        state = model.state_dict()
        assert state.keys() == found[0]["values"].keys()
        for name, value in found[0]["values"].items():
            assert torch.equal(state[name], value), (folder, name)
        assert model.generation_config is not None
        assert AutoTokenizer.from_pretrained(folder).encode("w7 w9") == [7, 9]
        assert AutoTokenizer.from_pretrained(folder).chat_template == fns.TEMPLATES
    assert AutoTokenizer.from_pretrained(checkpoint / "model").chat_template == fns.TEMPLATES
    sw.export_hf(checkpoint, tmp_path / "export of a step")
    assert AutoTokenizer.from_pretrained(tmp_path / "export of a step").chat_template == fns.TEMPLATES
    assert not list(checkpoint.glob("model*.safetensors")), "no second copy of the weights"
    for file in (checkpoint / "model").glob("*.safetensors"):
        assert file.stat().st_nlink == 2, "a link takes no room"
    _check_verified_once(checkpoint)


def _check_verified_once(checkpoint: Path) -> None:
    """``verify`` reads linked files once; one that is no link any more is read for itself."""
    files = [p for p in checkpoint.rglob("*") if p.is_file() and p.name != MANIFEST_NAME]
    found = sw.verify(checkpoint)
    assert found.ok, found.problems
    assert found.bytes_read == sum({p.stat().st_ino: p.stat().st_size for p in files}.values())
    top = next(checkpoint.glob("shard-*.safetensors"))
    content = top.read_bytes()
    top.unlink()
    top.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    problems = sw.verify(checkpoint).problems
    assert [p.split(":")[0] for p in problems] == [top.name], problems
