"""Engines that load by a function of theirs, in the style of vLLM and SGLang: what it gets is what it gets from full tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.errors import PlanError, RankError, StateError
from tests.handover import _fns as fns
from tests.harness.on_ranks import on_ranks
from tests.harness.tiers import nightly

Weights = Iterable[tuple[str, torch.Tensor]]

#: Part of a name → the fused tensor, and which of its parts it is.
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)} | {
    own: ("gate_up_proj", k) for own, k in (("gate_proj", 0), ("up_proj", 1), ("w1", 0), ("w3", 1))
}
PADDED = 8


class Engine:
    """Fuses Q, K and V, and gate and up; stacks experts; pads the vocabulary. ``rank`` of ``ranks`` takes its part of each."""

    def __init__(self, shapes: dict[str, torch.Tensor], rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.shapes = {n: t.shape for n, t in shapes.items()}
        self.params: dict[str, torch.Tensor] = {}
        sizes: dict[str, dict[int, int]] = {}
        for name, tensor in shapes.items():
            own, k, _ = self.place(name)
            rows = tensor.shape[0]
            if "embed" in name or "lm_head" in name:
                rows = -(-rows // PADDED) * PADDED
            whole = tensor.ndim != 2 or self.by_columns(name) or self.is_router(name)
            cut_rows = rows if whole else rows // ranks
            columns = tensor.shape[1:]
            if self.by_columns(name):
                columns = (tensor.shape[1] // ranks,)
            sizes.setdefault(own, {})[k] = cut_rows
            self.params[own] = torch.full(
                (sum(sizes[own].values()), *columns),
                -7.0,
                dtype=torch.float32 if "norm" in name else tensor.dtype,
            )
        self.offsets = {
            own: [sum(list(parts.values())[:k]) for k in range(3)] for own, parts in sizes.items()
        }

    @staticmethod
    def place(name: str) -> tuple[str, int, str]:
        parts = name.split(".")
        for own, (fused, k) in FUSED.items():
            if own in parts:
                parts[parts.index(own)] = fused
                return ".".join(parts), k, own
        return name, 0, ""

    @staticmethod
    def by_columns(name: str) -> bool:
        return any(part in name.split(".") for part in ("o_proj", "down_proj", "w2"))

    @staticmethod
    def is_router(name: str) -> bool:
        return name.endswith(".gate.weight")

    def load_weights(self, weights: Weights) -> set[str]:
        for name, weight in weights:
            own, k, _ = self.place(name)
            param = self.params[own].data
            if weight.ndim != 2 or self.is_router(name):
                param[:] = weight.float() if "norm" in name else weight
            elif self.by_columns(name):
                size = weight.shape[1] // self.ranks
                param.copy_(weight[:, self.rank * size : (self.rank + 1) * size].contiguous())
            elif "embed" in name or "lm_head" in name:
                size = param.shape[0]
                mine = weight[self.rank * size : (self.rank + 1) * size]
                param[: mine.shape[0]].copy_(mine)
                param[mine.shape[0] :].fill_(0)
            else:
                size = weight.shape[0] // self.ranks
                param.narrow(0, self.offsets[own][k], size).copy_(
                    weight.chunk(self.ranks)[self.rank].to(param.dtype)
                )
        return set(self.params)


@pytest.mark.parametrize(
    "trainer", ["cast", *nightly("fsdp", "hsdp", "stacked experts", "expert parallel", "fsdp x tp", "tied")]
)
@on_ranks(4)
def test_an_engine_that_fuses_and_cuts(root: Path, trainer: str) -> None:
    """Two engines of two ranks each. Each rank gets its parts alone: whole, then what changed; over the network, and from memory."""
    kind, naming, dtype, make = fns.TRAINERS[trainer]
    model = make(root / kind)

    def full() -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in sw.iter_full_tensors(model, naming=naming, dtype=dtype)}

    rank = dist.get_rank() % 2
    engines = {carry: Engine(full(), rank, 2) for carry in ("tcp", "memory")}
    reference = Engine(full(), rank, 2)
    with sw.handover.WeightSender(model, naming=naming, dtype=dtype) as sender:
        receivers = {
            carry: sw.handover.WeightReceiver(one.load_weights, sender.url, carry=carry)
            for carry, one in engines.items()
        }
        for version in (1, 2):
            fns.change(model, version, every=1 if version == 1 else 50)
            sender.publish(version)
            wanted = full()
            reference.load_weights(wanted.items())
            held = sum(p.numel() * wanted[n].element_size() for n, p in _sources(reference, wanted))
            for carry, receiver in receivers.items():
                report = receiver.pull()
                assert report is not None
                for name, param in reference.params.items():
                    assert torch.equal(engines[carry].params[name], param), (carry, version, name)
                assert report.local_bytes <= held
                if carry == "tcp" and version == 2:
                    assert report.bytes_moved < report.local_bytes / 4
                else:
                    assert report.bytes_moved == report.local_bytes
                assert receiver.pull() is None
        dist.barrier()


def _sources(engine: Engine, wanted: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Each parameter, with the name of a tensor that it is made of."""
    found = {engine.place(name)[0]: name for name in wanted}
    return [(found[own], param) for own, param in engine.params.items()]


@on_ranks(1)
def test_what_loaders_do_besides(root: Path) -> None:
    """A live engine isn't touched while it's recorded; casts, single values, transposes and later changes come out as with full tensors."""
    model = fns.TRAINERS["plain"][3](root / "qwen3")
    full = {n: t.clone() for n, t in sw.iter_full_tensors(model)}
    kept = {
        n: torch.full_like(t.t() if t.ndim == 2 else t, 5.0, dtype=torch.float64) for n, t in full.items()
    }
    seen: list[float] = []

    def load(weights: Weights) -> None:
        for name, weight in weights:
            if weight.ndim == 2:
                columns = torch.zeros(weight.shape[1], dtype=torch.long)
                columns[1:] += 1  # a tensor of its own, which steers what is taken
                for k in columns.cumsum(0).tolist():
                    kept[name][k].copy_(weight.to(torch.float64)[:, k], non_blocking=True)
            else:
                kept[name].data.copy_(weight)
                kept[name].mul_(2)
                seen.append(weight[0].item())

    with sw.handover.WeightSender(model) as sender:
        receiver = sw.handover.WeightReceiver(load, sender.url)
        assert receiver.pull() is None
        assert seen
        assert all(bool((t == 5).all()) for t in kept.values())
        sender.publish(1)
        seen.clear()
        assert receiver.pull() is not None
        for name, tensor in full.items():
            expected = tensor.double().t() if tensor.ndim == 2 else tensor.double() * 2
            assert torch.equal(kept[name], expected), name
        assert seen == [t[0].item() for t in full.values() if t.ndim == 1]
        with pytest.raises(StateError, match="function"):
            receiver.verify()


def _multiplies(weights: Weights) -> None:
    for _, weight in weights:
        torch.empty(weight.shape).copy_(weight * 2)


def _picks(weights: Weights) -> None:
    for _, weight in weights:
        torch.empty(weight.shape).copy_(weight[torch.tensor([0])])


def _adds(weights: Weights) -> None:
    target: torch.Tensor | None = None
    for _, weight in weights:
        target = torch.zeros(weight.shape) if target is None or target.shape != weight.shape else target
        target.add_(weight)


def _takes_it_lightly(weights: Weights) -> None:
    for _, weight in weights:
        target = torch.empty(weight.shape)
        try:
            target.copy_(weight * 2)
        except Exception:
            target.copy_(weight)


class _Keeps:
    kept: object = None

    def __call__(self, weights: Weights) -> None:
        for _, weight in weights:
            torch.empty(weight.shape).copy_(weight)
            if weight.ndim == 1:
                self.kept = weight


def _changes_what_it_gets(weights: Weights) -> None:
    for _, weight in weights:
        torch.empty(weight.shape).copy_(weight.mul_(2))


def _casts_twice(weights: Weights) -> None:
    for _, weight in weights:
        torch.empty(weight.shape).copy_(weight.half().float())


def _knows_no(name: str) -> Callable[[Weights], None]:
    def load(weights: Weights) -> None:
        for own, weight in weights:
            if own == name:
                raise KeyError(own)
            torch.empty(weight.shape).copy_(weight)

    return load


def _leaves_out(weights: Weights) -> None:
    for name, weight in weights:
        if not name.endswith("k_proj.weight"):
            torch.empty(weight.shape).copy_(weight)


def _of_another_shape(weights: Weights) -> None:
    for _, weight in weights:
        torch.empty(3, 5, 7).copy_(weight)


@on_ranks(2)
def test_what_cant_be_loaded_is_named(root: Path) -> None:
    """Before anything is pulled, with the tensor; and what the engine takes nothing of, unless the caller says that it's right."""
    model = fns.TRAINERS["fsdp"][3](root / "qwen3")
    first = "model.embed_tokens.weight"
    with sw.handover.WeightSender(model) as sender:
        sender.publish(1)
        for loader, words in (
            (_multiplies, f"can't be traced at '{first}'.*mul"),
            (_adds, f"can't be traced at '{first}'.*add_"),
            (_takes_it_lightly, f"can't be traced at '{first}'.*mul"),
            (_Keeps(), "keeps 'model.norm.weight' itself"),
            (_changes_what_it_gets, f"can't be traced at '{first}'.*mul_"),
            (_picks, f"can't be traced at '{first}'.*index"),
            (_casts_twice, f"can't be traced at '{first}'.*cast of torch.float32 to torch.float16"),
            (
                _knows_no("model.norm.weight"),
                "failed .the last tensor that it took was 'model.norm.weight'.: KeyError",
            ),
            (_of_another_shape, f"failed .the last tensor that it took was '{first}'.*broadcast"),
            (_leaves_out, "takes nothing of these tensors.*k_proj"),
        ):
            receiver = sw.handover.WeightReceiver(loader, sender.url)
            with pytest.raises((PlanError, RankError), match=f"(?s){words}"):
                receiver.pull()
            assert receiver.version is None
        receiver = sw.handover.WeightReceiver(_leaves_out, sender.url, allow_unused=["*k_proj.weight"])
        assert receiver.pull() is not None
        dist.barrier()


@on_ranks(1)
def test_what_a_loader_remembers(root: Path) -> None:
    """One that loads each tensor once gets nothing the second time: no version is called on. A new receiver's first run is the same."""
    model = fns.TRAINERS["plain"][3](root / "qwen3")
    seen = set[str]()
    kept: dict[str, torch.Tensor] = {}

    def load(weights: Weights) -> None:
        for name, weight in weights:
            if name not in seen:
                seen.add(name)
                kept.setdefault(name, torch.zeros(weight.shape)).copy_(weight)

    with sw.handover.WeightSender(model) as sender:
        sender.publish(1)
        receiver = sw.handover.WeightReceiver(load, sender.url)
        with pytest.raises(StateError, match=r"left out .* parts, e.g. of .*No version is on"):
            receiver.pull()
        assert receiver.version is None
        with pytest.raises(PlanError, match="takes nothing"):
            receiver.pull()
        seen.clear()
        receiver = sw.handover.WeightReceiver(lambda w: (seen.clear(), load(w)), sender.url)
        assert receiver.pull() is not None
        fns.same(kept, {n: t.clone() for n, t in sw.iter_full_tensors(model)})


@on_ranks(1)
def test_one_part_of_two_dtypes(root: Path) -> None:
    """Tensors of two dtypes, joined after a cast: each keeps its values."""
    given = {"a": torch.randn(6, 4).bfloat16(), "b": torch.randn(6, 4)}
    model = torch.nn.Module()
    for name, tensor in given.items():
        model.register_parameter(name, torch.nn.Parameter(tensor.clone()))
    kept = torch.zeros(12, 4), torch.zeros(12, 4, dtype=torch.bfloat16)

    def load(weights: Weights) -> None:
        own = dict(weights)
        kept[0].copy_(torch.cat([own["a"].float(), own["b"]]))
        kept[1].copy_(torch.cat([own["a"], own["b"].bfloat16()]))

    with sw.handover.WeightSender(model, naming="module") as sender:
        sender.publish(1)
        assert sw.handover.WeightReceiver(load, sender.url).pull() is not None
    assert torch.equal(kept[0], torch.cat([given["a"].float(), given["b"]]))
    assert torch.equal(kept[1], torch.cat([given["a"], given["b"].bfloat16()]))


@on_ranks(1)
def test_in_inference_mode(root: Path) -> None:
    """As vLLM's workers run."""
    model = fns.TRAINERS["plain"][3](root / "qwen3")
    kept: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def load(weights: Weights) -> None:
        for name, weight in weights:
            kept.setdefault(name, torch.zeros(weight.shape)).copy_(weight)

    with sw.handover.WeightSender(model) as sender:
        receiver = sw.handover.WeightReceiver(load, sender.url)
        for version in (1, 2):
            fns.change(model, version)
            sender.publish(version)
            assert receiver.pull() is not None
            with torch.inference_mode():
                fns.same(kept, {n: t.clone() for n, t in sw.iter_full_tensors(model)})


@on_ranks(2)
def test_a_loader_that_fails_on_one_rank(root: Path) -> None:
    """No version is on then, on any rank; the next pull loads all of it."""
    model = fns.TRAINERS["fsdp"][3](root / "qwen3")
    runs = [0]
    kept: dict[str, torch.Tensor] = {}

    def load(weights: Weights) -> None:
        runs[0] += 1
        for name, weight in weights:
            if runs[0] == 2 and dist.get_rank() == 1 and "norm" in name:
                raise OSError("no space")
            kept.setdefault(name, torch.zeros(weight.shape)).copy_(weight)

    with sw.handover.WeightSender(model) as sender:
        sender.publish(1)
        receiver = sw.handover.WeightReceiver(load, sender.url)
        with pytest.raises(RankError, match="no space"):
            receiver.pull()
        assert receiver.version is None
        assert receiver.pull() is not None
        fns.same(kept, {n: t.clone() for n, t in sw.iter_full_tensors(model)})
        dist.barrier()


def test_options_that_a_function_has_no_use_for() -> None:
    with pytest.raises(ValueError, match="key_mapping"):
        sw.handover.WeightReceiver(_multiplies, "shardwise://localhost:1/x", key_mapping={"a": "b"})
