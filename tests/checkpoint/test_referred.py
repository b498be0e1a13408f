"""Checkpoints that refer to a frozen base by its digests: small, resumed exactly, and only over that base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import CheckpointError, FormatError, StateError
from shardwise.format.manifest import checksum_of, parse_manifest, read_manifest
from tests.checkpoint import _referred_fns as fns
from tests.harness.command import runner
from tests.harness.models import build_reference
from tests.harness.pool import RankPool

BASE = {"base.0.weight", "base.0.bias", "base.1.weight", "base.1.bias"}
#: Of the base, and of the head with its moments and the buffer.
BASE_BYTES, REST_BYTES = 4 * (2 * 24 * 24 + 2 * 24), 3 * 4 * (4 * 24 + 4) + 8


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step that refers to the base of ``net()``."""
    state = fns.state_of(fns.net())
    fns.step(state, 1)
    sw.save(state, tmp_path / "step")
    return tmp_path / "step"


def slices_bytes(path: Path) -> int:
    """Payload of the slice files."""
    files = read_manifest(path).files.items()
    return sum(f.nbytes - f.header_bytes for n, f in files if n.startswith(("model/", "optimizer/shard")))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_goes_on_as_one_that_holds_its_base(mode: str, tmp_path: Path, ranks: RankPool) -> None:
    """On the same ranks and on others, sharded and replicated; nothing of the base is written, copied or staged."""
    straight = ranks.run_ranks(2, fns.run, str(tmp_path / "held"), mode, "fsdp", 0, 4, frozen="hold")
    ranks.run_ranks(2, fns.run, str(tmp_path / "run"), mode, "fsdp", 0, 2)
    found = ranks.run_ranks(2, fns.run, str(tmp_path / "run"), mode, "fsdp", 2, 4)
    for rank, held in zip(found, straight, strict=True):
        assert (rank[0], rank[1]) == (held[0][2:], held[1])
        assert held[2] - rank[2] >= BASE_BYTES // 2
    held_step, step = (tmp_path / name / "step-00000004" for name in ("held", "run"))
    assert slices_bytes(held_step) - slices_bytes(step) == BASE_BYTES
    assert sw.diff(held_step, step).ok
    for world_size, kind in ((3, "fsdp"), (4, "hsdp")):
        losses, digests, _ = ranks.run_ranks(
            world_size, fns.run, str(tmp_path / "run"), mode, kind, 4, 5 + world_size
        )[0]
        assert losses[0] == pytest.approx(straight[0][0][-1], rel=1e-5)
        assert {n: digests[n] for n in BASE} == {n: straight[0][1][n] for n in BASE}
        assert sw.verify(tmp_path / "run" / f"step-{5 + world_size:08d}").ok
        (tmp_path / "run" / f"step-{5 + world_size:08d}").rename(tmp_path / f"{kind} {mode}")


def test_it_says_what_it_refers_to(step: Path) -> None:
    entries = read_manifest(step).models["model"]
    assert {n for n, t in entries.items() if t.refers} == BASE
    report = sw.verify(step)
    assert (report.ok, report.referred) == (True, 4)
    for command in ("verify", "inspect"):
        found = runner().invoke(main, [command, str(step)])
        assert found.exit_code == 0, found.output
        assert "4 frozen base tensors" in found.output
    assert json.loads(runner().invoke(main, ["inspect", "--json", str(step)]).output)["referred"] == 4


def test_another_base_is_refused_before_anything_changes(tmp_path: Path, ranks: RankPool) -> None:
    """The step is not damaged: it stays, and is resumed over its own base."""
    root = tmp_path / "run"
    ranks.run_ranks(2, fns.run, str(root), "sync", "fsdp", 0, 2)
    for text, is_unchanged in ranks.run_ranks(2, fns.refused, str(root), 5):
        assert "base.0.weight: digest" in text
        assert "Load the base that the saved run began with" in text
        assert is_unchanged
    assert [p.name for p in sorted(root.glob("step-*"))] == ["step-00000002"]
    ranks.run_ranks(2, fns.run, str(root), "sync", "fsdp", 2, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.base.to("meta"), "base.0.weight: F32 [24, 24] when saved, no content"),
        (lambda model: model.base.half(), "F32 [24, 24] when saved, F16 [24, 24] now"),
        (lambda model: model.base.pop(1), "base.1.weight: F32 [24, 24] when saved, nothing now"),
    ],
)
def test_a_base_that_is_not_there(step: Path, change: Any, text: str) -> None:
    model = fns.net()
    change(model)
    before = model.head.weight.detach().clone()
    with pytest.raises(StateError) as caught:
        sw.restore(fns.state_of(model), step)
    assert text in str(caught.value)
    assert torch.equal(model.head.weight, before)


def test_a_load_fills_the_rest(step: Path) -> None:
    """Over the same base. Over another one, and on meta, it changes nothing."""
    saved, loaded, other = fns.net(), fns.net(), fns.net(1)
    fns.step(fns.state_of(saved), 1)
    with torch.no_grad():
        loaded.head.weight.zero_()
    sw.load(loaded, step)
    assert sw.digest(loaded) == sw.digest(saved)
    before = sw.digest(other)
    with pytest.raises(StateError, match=r"base\.0\.weight: digest"):
        sw.load(other, step)
    assert sw.digest(other) == before
    with sw.meta_init():
        empty = fns.Net()
    with pytest.raises(StateError, match=r"base\.0\.weight: F32 \[24, 24\] when saved, no content"):
        sw.load(empty, step)


def test_it_is_no_source(step: Path, tmp_path: Path) -> None:
    """Each entry point that needs the base says so."""
    with pytest.raises(CheckpointError, match=r"digests of 4 frozen tensors.*an export needs their content"):
        sw.export_hf(step, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"digests of 4 frozen tensors.*a conversion needs"):
        sw.convert(step, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_compared_with_the_base_itself(step: Path, tmp_path: Path) -> None:
    """Tensors that one side holds are read, and their digests compared."""
    held = fns.net()
    sw.save(sw.TrainState(model=held), tmp_path / "held")
    found = sw.diff(tmp_path / "held", step)
    assert {c.name for c in found.changed} == {"model:head.weight", "model:head.bias", "model:seen"}
    with torch.no_grad():
        held.base[1].bias[0] += 1
    sw.save(sw.TrainState(model=held), tmp_path / "other")
    changed = {c.name: c.what for c in sw.diff(step, tmp_path / "other").changed}
    assert changed["model:base.1.bias"] == "content (only its digest is held)"


def test_a_base_that_changes_is_not_referred_to(tmp_path: Path) -> None:
    """A save would lose the change: it is refused, and nothing is published."""
    model = fns.net()
    state = fns.state_of(model)
    with sw.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(state, 1)
        with torch.no_grad():
            model.base[0].bias[3] += 1e-6
        with pytest.raises(
            StateError, match=r"1 frozen tensors have changed since the step before: base\.0\.bias"
        ):
            checkpoints.save(state, 2)
        assert [p.name for p in (tmp_path / "run").glob("*step-*")] == ["step-00000001"]
        state.frozen = "hold"
        checkpoints.save(state, 3)
    assert not any(t.refers for t in read_manifest(tmp_path / "run/step-00000003").models["model"].values())


def test_what_was_trained_is_held(tmp_path: Path) -> None:
    """Frozen since: its optimizer still has a state for it."""
    state = fns.state_of(fns.net())
    fns.step(state, 1)
    state.models["model"].requires_grad_(False)
    sw.save(state, tmp_path / "step")
    entries = read_manifest(tmp_path / "step").models["model"]
    assert {n for n, t in entries.items() if t.refers} == BASE


def test_ranks_that_freeze_other_parameters(tmp_path: Path, ranks: RankPool) -> None:
    for text in ranks.run_ranks(2, fns.frozen_on_one_rank, str(tmp_path / "step")):
        assert "ranks do not describe the same tensors" in text
    assert not (tmp_path / "step").exists()


def test_manifests_that_say_nonsense(step: Path) -> None:
    text = json.loads((step / "manifest.json").read_text())
    entry = text["models"]["model"]
    for name, refers in (("head.weight", True), ("base.0.weight", 1), ("base.0.weight", "yes")):
        changed = json.loads(json.dumps(text))
        changed["models"]["model"][name] = {**entry[name], "refers": refers}
        changed["xxh3"] = checksum_of(changed)
        with pytest.raises(FormatError, match=f"{name}.*refers is"):
            parse_manifest(json.dumps(changed).encode(), "manifest.json")


def test_a_word_that_is_no_choice() -> None:
    with pytest.raises(StateError, match="frozen='drop': expected 'hold', 'refer' or 'auto'"):
        fns.state_of(fns.net(), frozen="drop")


def test_a_base_is_left_out_only_as_long_as_a_load_can_read_it_again(ranks: RankPool, tmp_path: Path) -> None:
    """Under "auto": not if another rank's part of it changed, and not if a checkpoint that held it replaced what was loaded."""
    build_reference("qwen3").save_pretrained(tmp_path / "base")
    for as_loaded, changed, restored, loaded, grown in ranks.run_ranks(
        2, fns.changed_on_one_rank, str(tmp_path / "base"), str(tmp_path)
    ):
        assert as_loaded
        assert (changed, restored, loaded) == (0, 0, 0)
        assert grown == as_loaded - 2  # embeddings and head have rows that no file holds
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("embed_tokens" in name for name in adapter)
