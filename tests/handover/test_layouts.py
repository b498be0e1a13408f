"""Weights handed from any layout of a trainer to any layout of an engine: bit for bit what an export gives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import RankError
from tests.handover import _fns as fns
from tests.harness.on_ranks import on_ranks
from tests.harness.tiers import nightly


@pytest.mark.parametrize(
    "trainer",
    [
        "hsdp",
        "cast",
        "fsdp x tp",
        *nightly(*(t for t in fns.TRAINERS if t not in ("hsdp", "cast", "fsdp x tp"))),
    ],
)
@on_ranks(4)
def test_any_layout_to_any_other(root: Path, trainer: str) -> None:
    """Whole over the network, then changes; whole from memory. Every engine has the bits of the gathered tensors, cast as it is."""
    kind, naming, dtype, make = fns.TRAINERS[trainer]
    model = make(root / kind)

    def expected() -> dict[str, torch.Tensor]:
        return {n: t.clone() for n, t in sw.iter_full_tensors(model, naming=naming, dtype=dtype)}

    with sw.handover.WeightSender(model, naming=naming, dtype=dtype) as sender:
        engines = {name: make_engine(expected()) for name, make_engine in fns.ENGINES.items()}
        by_link = {
            n: sw.handover.WeightReceiver(given, sender.url, carry="tcp") for n, (given, _) in engines.items()
        }
        for version in (1, 2, 4):
            fns.change(model, version, every=1 if version == 1 else 50)
            sender.publish(version)
            wanted = expected()
            for name, receiver in by_link.items():
                report = receiver.pull()
                assert report is not None
                assert (report.version, report.tensors) == (version, len(wanted)), name
                fns.same(engines[name][1](), wanted)
                receiver.verify()
                assert receiver.pull() is None
                if version > 1 and name != "another dtype" and report.local_bytes > 4096:
                    assert report.changed
                    assert report.bytes_moved < report.local_bytes / 4
                else:
                    assert report.bytes_moved == report.local_bytes
        other = {name: make_engine(wanted) for name, make_engine in fns.ENGINES.items()}
        for given, whole in other.values():
            report = sw.handover.WeightReceiver(given, sender.url, carry="memory").pull()
            assert report is not None
            assert report.bytes_moved == report.local_bytes
            fns.same(whole(), wanted)
        dist.barrier()


@pytest.mark.parametrize("engine", ["meta", *nightly("fsdp", "tensor parallel")])
@on_ranks(2)
def test_a_model_of_transformers_is_filled(root: Path, engine: str) -> None:
    """Its own conversions stack the experts again; parameters on meta get memory; logits are the trainer's."""
    source = root / "qwen3-moe"
    trainer = sw.load_pretrained(source, fns.mesh())
    fns.change(trainer, 3)
    model = fns.built(source)
    if engine == "fsdp":
        sw.shard(model, fns.mesh())
    elif engine == "tensor parallel":
        fns.by_tensors(model, fns.mesh())
    with sw.handover.WeightSender(trainer) as sender:
        sender.publish(7)
        receiver = sw.handover.WeightReceiver(model, sender.url)
        report = receiver.pull()
        assert report is not None
        receiver.verify()
        dist.barrier()
    expected = {n: t.clone() for n, t in sw.iter_full_tensors(trainer, naming="module")}
    fns.same({n: t.clone() for n, t in sw.iter_full_tensors(model, naming="module")}, expected)
    ids = torch.arange(8)[None]
    assert (
        torch.equal(model(input_ids=ids).logits, trainer(input_ids=ids).logits) or engine == "tensor parallel"
    )


@on_ranks(2)
def test_an_engine_under_fsdp_computes_with_what_it_pulled(root: Path) -> None:
    """A forward leaves gathered parameters behind, which aren't the ones that a pull fills."""
    source = root / "qwen3"
    trainer, model = sw.load_pretrained(source, fns.mesh()), fns.built(source)
    sw.shard(model, fns.mesh())
    model.eval()
    ids = torch.arange(8)[None]
    with sw.handover.WeightSender(trainer) as sender, torch.no_grad():
        receiver = sw.handover.WeightReceiver(model, sender.url)
        for version in (1, 2, 3):
            fns.change(trainer, version)
            sender.publish(version)
            receiver.pull()
            assert torch.equal(model(input_ids=ids).logits, trainer(input_ids=ids).logits), version
        dist.barrier()


@on_ranks(2)
def test_a_version_that_a_rank_could_not_publish_is_nobodys() -> None:
    model = nn.Linear(30, 20)
    engine = {n: torch.zeros_like(t) for n, t in model.state_dict().items()}
    with sw.handover.WeightSender(model) as sender:
        receiver = sw.handover.WeightReceiver(engine, sender.url)
        for version in (4, 5):
            sender.publish(version)
        with pytest.raises(RankError):
            sender.publish(6 + dist.get_rank())
        assert receiver.pull().version == 5
        with torch.no_grad():
            model.weight.fill_(3)
        sender.publish(6)
        assert receiver.pull(wait_s=5).version == 6
        assert (engine["weight"] == 3).all()
        # The time is over for all ranks at once, whenever each of them came.
        time.sleep(0.2 * dist.get_rank())
        assert receiver.pull(wait_s=0.3) is None
        dist.barrier()
