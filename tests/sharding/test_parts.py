"""declare_part(): pipeline stages and local experts are saved, resumed, loaded, and exported as one model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors import safe_open

import shardwise as sw
from shardwise.names import merged_order
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_rows
from tests.sharding import _parts_fns as fns

STEPS = (4, 14)
Layout = tuple[int, int, int]


def _world(layout: Layout) -> int:
    pp, dp, tp = layout
    return pp * dp * tp


@pytest.mark.parametrize(
    ("saved", "resumed", "tied"),
    [
        ((3, 1, 1), (2, 1, 1), False),
        ((2, 1, 1), (3, 1, 1), True),
        ((2, 2, 1), (1, 2, 1), False),
        *nightly_rows(
            ((1, 1, 1), (3, 1, 1), False),
            ((2, 1, 1), (1, 1, 1), False),
            ((3, 1, 1), (2, 1, 1), True),
            ((1, 2, 1), (3, 2, 1), False),
            ((2, 1, 2), (1, 1, 2), False),
            ((2, 2, 2), (3, 2, 2), False),
        ),
    ],
    ids=str,
)
def test_stages(ranks: RankPool, tmp_path: Path, saved: Layout, resumed: Layout, tied: bool) -> None:
    """10 steps after a resume with other stages have the bits of the run that never stopped: no sum is over stages."""
    path = str(tmp_path / "step")
    never, *_ = ranks.run_ranks(
        _world(saved), fns.staged_run, saved, (0, STEPS[1]), {STEPS[0]: path}, tied=tied
    )
    after = ranks.run_ranks(_world(resumed), fns.staged_run, resumed, STEPS, {}, path, tied=tied)
    assert after == [never] * _world(resumed)


@pytest.mark.parametrize(
    ("saved", "resumed", "tied"),
    [
        ((1, 1, 1), (2, 1, 1), True),
        ((2, 1, 2), (3, 1, 1), False),
        *nightly_rows(((2, 2, 1), (3, 1, 1), False), ((1, 2, 2), (2, 1, 2), False)),
    ],
    ids=str,
)
def test_where_sums_are_in_another_order(
    ranks: RankPool, tmp_path: Path, saved: Layout, resumed: Layout, tied: bool
) -> None:
    """With other numbers of data-parallel or tensor-parallel ranks, and of copies of a tied embedding, further steps differ in their last
    bits: gradients are added in another order. What is restored, and saved again, doesn't differ, the optimizer's state included."""
    path, again = str(tmp_path / "step"), str(tmp_path / "again")
    before, *_ = ranks.run_ranks(_world(saved), fns.staged_run, saved, (0, 2), {2: path}, tied=tied)
    after = ranks.run_ranks(_world(resumed), fns.staged_run, resumed, (2, 2), {2: again}, path, tied=tied)
    assert after == [before] * _world(resumed)
    assert sw.diff(path, again).ok


@pytest.mark.parametrize(
    ("kind", "saved", "resumed"),
    [
        ("packed", (1, 2), (1, 4)),
        ("listed", (1, 4), (1, 1)),
        ("packed", (2, 2), (2, 1)),
        *nightly_rows(
            ("packed", (1, 1), (1, 2)),
            ("packed", (1, 4), (1, 1)),
            ("listed", (1, 1), (1, 2)),
            ("listed", (1, 2), (1, 4)),
            ("listed", (2, 2), (2, 1)),
            ("listed", (2, 1), (2, 4)),
        ),
    ],
    ids=str,
)
def test_experts(
    ranks: RankPool, tmp_path: Path, kind: str, saved: tuple[int, int], resumed: tuple[int, int]
) -> None:
    """The same with experts over another number of ranks, with data parallelism and without: no sum is over these ranks."""
    path = str(tmp_path / "step")
    before, later = saved[0] * saved[1], resumed[0] * resumed[1]
    never, *_ = ranks.run_ranks(before, fns.experts_run, kind, saved, (0, STEPS[1]), {STEPS[0]: path})
    after = ranks.run_ranks(later, fns.experts_run, kind, resumed, STEPS, {}, path)
    assert after == [never] * later


@pytest.mark.parametrize("by_transformers", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_load_and_export(ranks: RankPool, tmp_path: Path, tied: bool, by_transformers: bool) -> None:
    """Each stage reads its own bytes; the export is the source, bit for bit, whichever rank wrote a tensor."""
    if by_transformers:
        pytest.importorskip("transformers.distributed.pipeline_parallel")
    source, out = tmp_path / "source", tmp_path / "out"
    model = fns.llama(tied=tied)
    model.save_pretrained(source)
    (whole,) = ranks.run_ranks(1, fns.digest_of_whole, tied=tied)
    options = {"tied": tied, "by_transformers": by_transformers}
    found = ranks.run_ranks(3, fns.loaded_and_exported, str(source), str(out), **options)
    size = sum(p.nbytes for p in model.parameters())
    for digests, own, read in found:
        assert digests == whole
        assert 0 < own <= size * 2 // 3
        assert read <= own + 4096
    with (
        safe_open(source / "model.safetensors", "pt") as given,
        safe_open(out / "model.safetensors", "pt") as written,
    ):
        assert sorted(given.keys()) == sorted(written.keys())
        assert all(given.get_tensor(n).equal(written.get_tensor(n)) for n in given.keys())  # noqa: SIM118


def test_several_stages_of_a_rank(ranks: RankPool, tmp_path: Path) -> None:
    """Stages 0 and 2 on one rank, and 1 on the other; the optimizer is that of the whole model, too."""
    root = tmp_path / "run"
    ranks.run_ranks(2, fns.virtual_stages, str(root))
    saved = str(root / "step-00000001")
    (after,), (never,) = (ranks.run_ranks(1, fns.whole_after, given) for given in (saved, ""))
    assert after == never


def test_a_layer_of_no_rank(ranks: RankPool, tmp_path: Path) -> None:
    fns.llama().save_pretrained(tmp_path)
    for text in ranks.run_ranks(2, fns.lost_layer, str(tmp_path)):
        assert text.startswith("PlanError"), text
        assert "model.layers.1.*" in text


def test_experts_that_fsdp_shards(ranks: RankPool, tmp_path: Path) -> None:
    """FSDP2 cuts the experts of each rank after the declaration has cut the whole tensor."""
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    ranks.run_ranks(4, fns.sharded_experts, first, (2, 2))
    (after,) = ranks.run_ranks(1, fns.sharded_experts, second, (1, 1), first)
    again = ranks.run_ranks(4, fns.sharded_experts, third, (2, 2), first)
    assert again == [after] * 4


WRONG = {
    "hole": "w: no rank holds the box from \\[8, 0\\] of sizes \\[4, 2\\]",
    "overlap": "w: the box from \\[2, 0\\].* on rank 1 overlaps",
    "outside": "rank 1: w: the box from \\[5, 0\\].* is not inside the global shape \\[8, 2\\]",
    "sizes": "w: boxes of different sizes: .*rank 0.*rank 1",
    "copies": "w: no rank holds the box from \\[4, 0\\]",
    "dims": "rank 0: w: the box has 1 dims",
    "global shape": "w: its global shape is \\[8, 2\\] on rank 0, \\[12, 2\\] on rank 1",
    "dtype": "w: its dtype is F32 on rank 0, BF16 on rank 1",
    "kind": "w: its kind is parameter on rank 0, buffer on rank 1",
    "frozen": "w: its requires_grad is True on rank 0, False on rank 1",
    "no such name": "boxes=\\{'x.\\*': …\\} matches no tensor of any rank",
    "one name": "rename= gives two tensors the name 'w'",
    "mesh": "w: a DTensor whose mesh has ranks \\[0, 1\\], which declare different boxes",
    "tie": "v is another name of w on rank 0, and a tensor of its own on rank 1",
    "changed": "1 tensors have changed since declare_part: w was torch.float32",
    "bytes": "replicas of w differ between ranks",
    "uneven copies": "w: 2 copies of one box, on ranks \\[0, 1\\], but 1 of another, on ranks \\[2\\]",
    "differing buffers": "replicas of w differ between ranks",
    "two patterns": "rank 0: w: several patterns of boxes= match it and differ: \\['w', '\\*'\\]",
    "not text": "rank 1: rename= gives 1 for 'w', expected text",
    "blocks": "w: a box whose own mesh cuts it in blocks",
    "mesh order": "w was torch.float32 .* on ranks \\[0, 1\\], and is .* on ranks \\[1, 0\\]",
    "frozen later": "w was .*requires_grad True.* and is .*requires_grad False",
    "drawn": "PlanError.*\\n.*w: is declared with boxes=",
    "drawn renamed": "1.weight: no module has this name",
    "optimizers": "ranks have different optimizers: sgd0 on rank 0, sgd1 on rank 1",
    "options": "optimizer optimizer: the lr of group 0 is 1.0 on rank 0, and 2.0 on rank 1",
    "steps": "the tensors of w differ .* packed experts without tokens need a gradient of zeros",
    "no parameters": "optimizer model: has no parameters on this rank",
    "refer": "frozen='refer' isn't supported for a model that is declared in parts",
    "sharded extra": "extra.ema has sharded tensors.*call declare_part on it",
    "groups": "optimizer optimizer: its number of parameter groups differs between ranks: 1 on rank 0, 2 on rank 1",
}

OF_THREE = ("uneven copies", "differing buffers")


@pytest.mark.parametrize("case", WRONG)
def test_wrong_declarations_are_named(ranks: RankPool, case: str) -> None:
    for text in ranks.run_ranks(3 if case in OF_THREE else 2, fns.wrong, case):
        assert re.search(WRONG[case], text), text


def test_small_stages(ranks: RankPool, tmp_path: Path) -> None:
    """Tensors without dims have their digests and shapes on all ranks. What a rank stored for itself goes to no other stage."""
    for reported, error in ranks.run_ranks(2, fns.small_stages, str(tmp_path / "step")):
        assert reported == []
        assert (
            "extra.ema was stored per rank by 2 ranks, but ranks of this run hold other parts of the model"
            in error
        )


def test_two_declared_models(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run_ranks(4, fns.two_models, str(tmp_path / "step"))


@pytest.mark.parametrize(
    ("lists", "order"),
    [
        ([["e", "l.0.a", "l.0.b"], ["l.1.a", "l.1.b", "n"]], "e l.0.a l.0.b l.1.a l.1.b n"),
        (
            [["e", "l.0.a", "l.0.b", "l.2.a", "l.2.b"], ["l.1.a", "l.1.b", "n"]],
            "e l.0.a l.0.b l.1.a l.1.b l.2.a l.2.b n",
        ),
        (
            [["l.0.x.0", "n.0", "l.1.x.0", "n.1"], ["l.0.x.1", "n.0", "l.1.x.1", "n.1"]],
            "l.0.x.0 l.0.x.1 n.0 l.1.x.0 l.1.x.1 n.1",
        ),
        ([["e"], ["h", "e"], []], "h e"),
    ],
)
def test_order_of_the_whole_model(lists: list[list[str]], order: str) -> None:
    assert merged_order(lists) == order.split()
