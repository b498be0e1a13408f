"""Conversions: whoever stored it, the checkpoint verifies, and a run goes on from it with the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.errors import CheckpointError, IntegrityError, PlanError, StateError
from shardwise.format.manifest import read_manifest
from tests.catalog import _dcp_fns
from tests.export import _export_fns
from tests.harness.pool import RankPool
from tests.harness.process import worker_env
from tests.harness.tiers import nightly
from tests.runs import _convert_fns as fns
from tests.runs import _third_party_fns


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert _export_fns.same(found[name], tensor), name


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", *nightly("FULL_STATE_DICT")])
def test_what_accelerate_stores(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    root = str(tmp_path / "state")
    expected = ranks.run_ranks(2, _dcp_fns.accelerate_trains, root, kind, 3, 6)
    alone = sw.convert(root, tmp_path / "alone").to_json()
    several = ranks.run_ranks(3, fns.convert_on_ranks, root, str(tmp_path / "several"), {})
    held = sum(p.numel() * 4 * 3 + 4 for p in _dcp_fns.Lines().parameters())
    assert alone["bytes_read"] <= 1.05 * held
    assert sum(r["bytes_read"] for r in several) <= 1.05 * held
    assert all(r["bytes_written"] > held / 5 for r in several), "every rank writes its part"
    assert (alone["tensors"], alone["optimizer_tensors"]) == (14, 14 * 3)
    for name in ("alone", "several"):
        assert sw.verify(tmp_path / name).ok
        found = ranks.run_ranks(2, _dcp_fns.goes_on_here, str(tmp_path / name), 3, 6)
        assert [rank["losses"] for rank in found] == expected
        assert [rank["documents"] for rank in found] == [("scheduler",)] * 2
        assert not any(rank["exact"] for rank in found), "nothing vouches for RNG and data"


def test_what_torchtitan_stores(ranks: RankPool, tmp_path: Path) -> None:
    folder, out = str(tmp_path / "step-3"), str(tmp_path / "out")
    expected = ranks.run_ranks(2, _third_party_fns.titan_saves, folder)
    report = sw.convert(folder, out)
    assert report.step == 3
    (lost,) = [line for line in report.skipped if line.startswith("scheduler")]
    assert "every key as text" in lost, "a Counter of milestones can't be told from one of text"
    assert sw.verify(out).ok
    state_dict = sw.TrainState(model=_dcp_fns.Lines())
    sw.restore(state_dict, out)
    assert_same(dict(state_dict.models["model"].state_dict()), _whole_of(folder))
    assert len(expected[0]) == 5


def _whole_of(folder: str) -> dict[str, torch.Tensor]:
    model = _dcp_fns.Lines()
    sw.load(model, folder)
    return dict(model.state_dict())


def test_a_hub_directory_becomes_a_checkpoint_and_comes_back(ranks: RankPool, tmp_path: Path) -> None:
    """Experts that are stored one by one: fused in the checkpoint, as the module has them."""
    source = tmp_path / "source"
    fns.save_qwen_moe(str(source))
    (source / "tokenizer_config.json").write_text("{}\n")
    expected = dict(transformers.Qwen3MoeForCausalLM.from_pretrained(source).state_dict())
    reports = ranks.run_ranks(2, fns.convert_on_ranks, str(source), str(tmp_path / "two"), {})
    reports.append(sw.convert(source, tmp_path / "one").to_json())
    total = sum(t.numel() * t.element_size() for t in expected.values())
    assert reports[0]["bytes_read"] + reports[1]["bytes_read"] == reports[2]["bytes_read"] == total
    for name in ("one", "two"):
        assert sw.verify(tmp_path / name).ok
        assert read_manifest(tmp_path / name).models["model"].keys() == expected.keys()
        model, report = sw.load_pretrained(tmp_path / name, return_report=True)
        assert report.verified == "digest"
        assert_same(dict(model.state_dict()), expected)
        sw.export_hf(tmp_path / name, tmp_path / f"{name}-out")
        assert_same(_export_fns.stored_tensors(tmp_path / f"{name}-out"), _export_fns.stored_tensors(source))
        assert (tmp_path / f"{name}-out" / "tokenizer_config.json").read_text() == "{}\n"


@pytest.mark.parametrize("kind", ["tied", *nightly("moe")])
def test_a_dcp_checkpoint_of_a_transformers_model(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """With the config, and without: as a checkpoint from which a Checkpointer resumes, and as a hub directory."""
    source, folder = str(tmp_path / "source"), str(tmp_path / "dcp")
    (fns.save_qwen_moe if kind == "moe" else fns.save_tied)(source)
    saved = ranks.run_ranks(2, fns.dcp_saves, source, folder)
    assert (kind == "tied") is ("lm_head.weight" in saved[0]["stored"] and len(saved[0]["stored"]) == 21)
    for config in (None, source):
        root = tmp_path / f"run-{config is None}"
        root.mkdir()
        sw.convert(folder, root / "step-00000002", config=config)
        assert sw.verify(root / "step-00000002").ok
        found = ranks.run_ranks(2, fns.resumes, source, str(root))
        assert [r["losses"] for r in found] == [r["losses"] for r in saved]
        assert found[0]["report"]["step"] == 2
        assert sorted(p.name for p in root.glob("step-*")) == ["step-00000002", "step-00000003"]
    sw.export_hf(folder, tmp_path / "hub", config=source)
    assert _export_fns.stored_tensors(tmp_path / "hub").keys() == _export_fns.stored_tensors(source).keys()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert_same(dict(model.state_dict()), saved[0]["values"])


def test_transformers_own_distributed_save_becomes_a_hub_directory(ranks: RankPool, tmp_path: Path) -> None:
    source, folder = str(tmp_path / "source"), str(tmp_path / "saved")
    fns.save_qwen_moe(source)
    (expected, *_) = ranks.run_ranks(2, _third_party_fns.transformers_saves, source, folder, True)
    sw.export_hf(folder, tmp_path / "hub", config=source)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    for name, tensor in model.state_dict().items():
        assert _export_fns.same(tensor, expected[name]), name
    report = sw.convert(folder, tmp_path / "ours", config=source)
    assert report.optimizer_tensors == 3 * report.tensors
    assert sw.verify(tmp_path / "ours").ok


def test_a_checkpoint_is_cut_anew(ranks: RankPool, tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    fns.save_tied(source)
    saved = ranks.run_ranks(4, fns.saves_checkpoint, source, str(tmp_path / "four"))
    report = sw.convert(tmp_path / "four", tmp_path / "one")
    assert "rng: stored per rank" in report.skipped
    assert len(list((tmp_path / "four" / "model").glob("*.safetensors"))) == 4
    assert len(list((tmp_path / "one" / "model").glob("*.safetensors"))) == 1
    before, after = (read_manifest(tmp_path / name) for name in ("four", "one"))
    assert (after.run_id, after.step, after.parent_step) == (before.run_id, 2, None)
    digests = [{n: t.digest for n, t in m.models["model"].items()} for m in (before, after)]
    assert digests[0] == digests[1]
    assert sw.verify(tmp_path / "one").ok
    for rank, first in zip(
        ranks.run_ranks(4, fns.restores, source, str(tmp_path / "one")), saved, strict=True
    ):
        assert rank["digests"] == first["digests"]
        assert rank["losses"] == first["losses"]
        assert not rank["exact"]
        lost = "the saved run's RNG states and number of ranks are not in it"
        assert rank["differences"] == (f"converted from checkpoint: {lost}",)
    file = sorted((tmp_path / "four" / "model").glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match="differs from what was saved"):
        sw.convert(tmp_path / "four", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
    assert not list(tmp_path.glob(".t*")), "and no leftovers"


def test_several_models_are_cut_anew(ranks: RankPool, tmp_path: Path) -> None:
    from tests.checkpoint import _several_models_fns

    (expected, *_) = ranks.run_ranks(2, _several_models_fns.digests_of, str(tmp_path / "two"), False)
    sw.convert(tmp_path / "two", tmp_path / "one")
    assert sw.verify(tmp_path / "one").ok
    for found in ranks.run_ranks(2, _several_models_fns.digests_of, str(tmp_path / "one"), False):
        assert found == expected


def test_tensors_without_a_config_keep_their_names(tmp_path: Path) -> None:
    """Every dtype, scalars and what is empty; integers are not cast."""
    tensors = {
        "a.weight": torch.randn(5, 3, dtype=torch.bfloat16),
        "a.codes": torch.arange(4, dtype=torch.int8),
        "b": torch.tensor(1.5, dtype=torch.float64),
        "c": torch.zeros(0, 4),
        "d": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    sw.convert(tmp_path / "model.safetensors", tmp_path / "out")
    assert sw.verify(tmp_path / "out").ok
    (file,) = (tmp_path / "out" / "model").glob("*.safetensors")
    assert_same(load_file(file), tensors)
    torch.save(tensors, tmp_path / "some.pt")
    sw.convert(tmp_path / "some.pt", tmp_path / "again")
    (file,) = (tmp_path / "again" / "model").glob("*.safetensors")
    assert_same(load_file(file), tensors)


def test_what_is_not_complete_or_does_not_fit(ranks: RankPool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    fns.save_tied(str(source))
    stored = load_file(source / "model.safetensors")
    lost = dict(stored)
    del lost["model.layers.1.mlp.up_proj.weight"]
    save_file(lost, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(PlanError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        sw.convert(source, tmp_path / "out")
    head = torch.randn_like(stored["model.embed_tokens.weight"])
    save_file({**stored, "lm_head.weight": head}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(PlanError, match="second stored copy"):
        sw.convert(source, tmp_path / "out")
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    (tmp_path / "taken").mkdir()
    found = ranks.run_ranks(2, fns.failure_of_convert, str(source), str(tmp_path / "taken"), {})
    assert found[0] == found[1]
    assert found[0][0] == CheckpointError.__name__
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "taken"]


def test_state_of_a_shape_of_its_own_is_refused(tmp_path: Path) -> None:
    """Adafactor's rows and columns: how they lay on ranks is not stored."""
    weight = torch.ones(4, 3)
    torch.save({"w": weight}, tmp_path / "pytorch_model_fsdp.bin")
    state = {"w": {"exp_avg_sq_row": torch.ones(4)}}
    torch.save({"state": state, "param_groups": [{"params": ["w"]}]}, tmp_path / "optimizer.bin")
    with pytest.raises(StateError, match=r"w\.exp_avg_sq_row has shape \[4\]"):
        sw.convert(tmp_path, tmp_path / "out")
    state = {"stranger": {"exp_avg": weight}}
    torch.save({"state": state, "param_groups": [{"params": ["stranger"]}]}, tmp_path / "optimizer.bin")
    with pytest.raises(StateError, match="stranger, which the model doesn't have"):
        sw.convert(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_memory_is_bounded(tmp_path: Path) -> None:
    """A tensor of 128 MiB with as much optimizer state goes through in less than 24 MiB."""
    for name, rows in (("small", 32), ("large", 32 * 1024)):
        folder = tmp_path / name
        folder.mkdir()
        weight = torch.randn(rows, 1024)
        torch.save({"w": weight}, folder / "pytorch_model_fsdp.bin")
        state: dict[str, Any] = {"w": {"momentum_buffer": weight}}
        torch.save({"state": state, "param_groups": [{"params": ["w"], "lr": 0.1}]}, folder / "optimizer.bin")
    script = (
        "import resource, sys\n"
        "import shardwise as sw\n"
        "sw.convert(sys.argv[1], sys.argv[1] + '-out')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "sw.convert(sys.argv[2], sys.argv[2] + '-out')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "small"), str(tmp_path / "large")],
        env=worker_env(),
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 24 * 1024**2
    document = json.loads((tmp_path / "large-out" / "state.json").read_text())
    assert document["optimizer"]["class"] is None
