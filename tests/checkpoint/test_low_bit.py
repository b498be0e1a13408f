"""torchao's optimizers keep states in blocks of few bits: saved, resumed and resharded, judged by the second step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.format.manifest import read_manifest
from tests.checkpoint import _low_bit_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but

STEP = f"step-{fns.BEFORE:08d}"
_SAVED: dict[str, tuple[Path, list[dict[str, Any]]]] = {}


def saved(ranks: RankPool, factory: pytest.TempPathFactory, name: str) -> tuple[Path, list[dict[str, Any]]]:
    """A run of two ranks, saved once for all tests: in the background while it goes on for two optimizers of three."""
    if name not in _SAVED:
        root = factory.mktemp(name)
        mode = "sync" if name == "AdamW4bit" else "async"
        _SAVED[name] = root, ranks.run_ranks(2, fns.saved, str(root), name, mode)
    return _SAVED[name]


def same(a: fns.Gathered, b: fns.Gathered) -> bool:
    return a.keys() == b.keys() and all(
        a[n].keys() == b[n].keys()
        and all(torch.equal(a[n][p].view(torch.uint8), b[n][p].view(torch.uint8)) for p in a[n])
        for n in a
    )


@pytest.mark.parametrize("name", fns.NAMES)
def test_the_second_step_after_a_resume_is_that_of_a_run_that_went_on(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    root, first = saved(ranks, tmp_path_factory, name)
    assert {"OptimState" + name.removeprefix("AdamW")} < first[0]["kinds"]  # and plain ones
    whole = fns.joined([r["held"] for r in first])
    for rank, (before, after) in enumerate(
        zip(first, ranks.run_ranks(2, fns.resumed, str(root), name, whole, "fsdp", True), strict=True)
    ):
        assert (after["exact"], after["lines"]) == (True, ()), rank
        assert after["in place"]
        assert after["as by hand"] == (True, True, True)
        assert (after["losses"], after["bits"]) == (before["losses"], before["bits"])
    assert sw.verify(root / STEP).problems == ()


@pytest.mark.parametrize("name", fns.NAMES)
@pytest.mark.parametrize(
    ("world_size", "mesh_kind"), [(1, "fsdp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp"), (2, "plain")]
)
def test_on_other_ranks_states_and_steps_are_those_of_states_placed_by_hand(
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    world_size: int,
    mesh_kind: str,
) -> None:
    root, first = saved(ranks, tmp_path_factory, name)
    whole = fns.joined([r["held"] for r in first])
    found = ranks.run_ranks(world_size, fns.resumed, str(root), name, whole, mesh_kind)
    for rank in found:
        assert rank["as by hand"] == (True, True, True)
        assert not rank["exact"]
        assert all("world size" in line or "mesh" in line or "rng" in line for line in rank["lines"]), rank[
            "lines"
        ]
        assert rank["kinds"] == first[0]["kinds"]
    if mesh_kind == "fsdp":
        assert same(fns.joined([r["held"] for r in found]), whole)
    else:
        assert same(fns.joined([r["held"] for r in found[: 1 if mesh_kind == "plain" else 2]]), whole)


@pytest.mark.parametrize("name", nightly_but(fns.NAMES, "AdamW4bit"))
def test_a_chain_of_meshes_gives_the_same_digests(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, name: str
) -> None:
    """Three ranks, of which one contains no row of ``two``, save what two saved."""
    root, _ = saved(ranks, tmp_path_factory, name)
    source = root / STEP
    for stop, (world_size, mesh_kind) in enumerate([(3, "fsdp"), (4, "hsdp"), (1, "plain"), (2, "fsdp")]):
        target = tmp_path / str(stop)
        ranks.run_ranks(world_size, fns.passed_on, str(source), str(target), name, mesh_kind)
        assert sw.diff(root / STEP, target).ok, (world_size, mesh_kind)
        assert sw.verify(target).problems == ()
        source = target


def test_parts_are_tensors_of_the_manifest(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    root, _ = saved(ranks, tmp_path_factory, "AdamW4bit")
    entries = read_manifest(root / STEP).models["model"]
    odd = entries["odd.weight"]
    found = {s: (e.dtype, odd.shape_of(e)) for s, e in odd.states["optimizer"].items() if e.packed is None}
    # Four rows of 96 are three blocks of 128; a code holds two elements.
    scale, codes = ("F32", (24, 3)), ("U8", (24, 192))
    assert found == {
        "exp_avg:codes": codes, "exp_avg:scale": scale, "exp_avg_sq:codes": codes, "exp_avg_sq:scale": scale
    }  # fmt: skip
    assert all(e.digest for e in odd.states["optimizer"].values() if e.packed is None)
    assert set(entries["odd.bias"].states["optimizer"]) == {"step", "exp_avg", "exp_avg_sq"}


# ---------------------------------------------------------------------------------------------- refusals, damage


def test_cuts_inside_blocks_are_refused_before_anything_is_read(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, _ = saved(ranks, tmp_path_factory, "AdamW8bit")
    for rank in ranks.run_ranks(5, fns.refused, str(root / STEP), "AdamW8bit"):
        assert rank["kind"] == "StateError"
        assert rank["unchanged"]
        assert "odd.weight.exp_avg is OptimState8bit in blocks of 256 elements" in rank["text"]
        assert "at multiples of 8" in rank["text"]
        assert "the saved mesh (shard 2)" in rank["text"]
        assert rank["text"].endswith("numbers of ranks: 1, 2, 3, 4, 6, 12")


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_damaged_byte_is_found(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, part: str
) -> None:
    root, _ = saved(ranks, tmp_path_factory, "AdamWFp8")
    copy = tmp_path / "copy"
    sw.copy_checkpoint(root / STEP, copy)
    file = next(copy.glob("optimizer/shard-00001-*"))
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + length])[f"wide.weight.exp_avg:{part}"]["data_offsets"]
    content[8 + length + begin + 5] ^= 0x04
    file.chmod(0o644)
    file.write_bytes(content)
    assert any(f"wide.weight.exp_avg:{part}" in problem for problem in sw.verify(copy).problems)
    for rank in ranks.run_ranks(2, fns.refused, str(copy), "AdamWFp8"):
        assert rank["kind"] == "IntegrityError"
        assert f"wide.weight.exp_avg:{part}" in rank["text"]


def test_a_parameter_of_which_ranks_keep_a_part_in_full_resumes_on_the_same_mesh_only(
    ranks: RankPool, tmp_path: Path
) -> None:
    first = ranks.run_ranks(2, fns.saved, str(tmp_path), "AdamW8bit", "sync", "fsdp", fns.Mixed)
    assert [("OptimState8bit" in r["kinds"]) for r in first] == [True, False]
    for before, after in zip(
        first, ranks.run_ranks(2, fns.resumed_alone, str(tmp_path), "AdamW8bit", fns.Mixed), strict=True
    ):
        assert after["exact"]
        assert (after["losses"], after["bits"]) == (before["losses"], before["bits"])
    (found,) = ranks.run_ranks(1, fns.refused, str(tmp_path / STEP), "AdamW8bit", fns.Mixed)
    assert (found["kind"], found["unchanged"]) == ("StateError", True)
    assert (
        "head.weight.exp_avg (OptimState8bit in blocks of 256) and 1 others were stored by rank"
        in found["text"]
    )


def test_cuts_inside_blocks_of_the_saved_run_resume_on_the_same_mesh(ranks: RankPool, tmp_path: Path) -> None:
    for rank in ranks.run_ranks(2, fns.columns, str(tmp_path / "step")):
        assert (rank["exact"], rank["bitwise"]) == (True, True)


# ---------------------------------------------------------------------------------------------- bitsandbytes


def test_bitsandbytes_resumes_where_parameters_are_whole_on_each_rank(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    for rank in ranks.run_ranks(2, fns.eight_bits, path):
        assert (rank["exact"], rank["bitwise"]) == (True, True)
    (found,) = ranks.run_ranks(1, fns.eight_bits_refused, path)
    assert found.startswith("StateError")
    assert "optimizer.opaque was stored per rank by 2 ranks" in found


def test_bitsandbytes_over_shards_is_refused_by_itself_or_by_name(ranks: RankPool) -> None:
    for rank in ranks.run_ranks(2, fns.eight_bits_over_shards):
        assert "DTensor" in rank["its own step"]
        assert rank["steps"]
        assert "parameter 0 of shape [64, 128], which is this rank's part of 0.weight" in rank["save"]
        assert "torchao" in rank["save"]
