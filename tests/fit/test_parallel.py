"""Plans with tensor and expert parallelism, against models that transformers cut and that ran on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.errors import ShardError
from tests.fit import _parallel_fns
from tests.harness.pool import RankPool

BATCH, LENGTH = 2, 64
CPU = sw.TrainingSpec(batch_size=BATCH, sequence_length=LENGTH, device="cpu", optimizer="sgd")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with weights."""
    directory = tmp_path_factory.mktemp("parallel") / "moe"
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def planned(path: Path, ranks: int, tp: int, ep: int) -> Any:
    report = sw.plan(path, ranks=ranks, tp=tp, ep=ep, training=CPU)
    assert report.run is not None
    assert not any("with a formula" in text for text in report.run.assumptions)
    return report


@pytest.mark.needs("plans")
def test_what_ranks_hold_and_read(moe: Path, ranks: RankPool) -> None:
    """FSDP x TP, FSDP x EP, and all three, filled by ``load``: to the byte, on each rank."""
    layouts = [(2, 1), (1, 2), (1, 4), (2, 4)]
    found = ranks.run_ranks(
        4, _parallel_fns.measured, str(moe), layouts, BATCH, LENGTH, shards=True, timeout_s=300
    )
    for k, (tp, ep) in enumerate(layouts):
        report = planned(moe, 4, tp, ep)
        assert [(c.shard_bytes, c.bytes_read) for c in report.per_rank] == [
            (rank[k]["held"], rank[k]["read"]) for rank in found
        ], (tp, ep)
        assert report.run.checkpoint.nbytes == report.model_bytes


@pytest.mark.needs("plans")
def test_what_a_step_sends_and_takes(moe: Path, ranks: RankPool) -> None:
    """Bytes of collectives are exact, but for what routing sends to which expert: over both ranks that is the mean."""
    layouts = [(2, 1), (1, 2), (2, 2)]
    found = ranks.run_ranks(
        2, _parallel_fns.measured, str(moe), layouts, BATCH, LENGTH, shards=False, timeout_s=300
    )
    for k, (tp, ep) in enumerate(layouts):
        run = planned(moe, 2, tp, ep).run
        flows = {flow.what: flow.rank_bytes for flow in run.network}
        sent = [rank[k]["sent"] for rank in found]
        # Of two ranks, each receives half of what it gathers or exchanges, and all that it reduces.
        reduced = sent[0].get("all-reduce", 0) + sent[0].get("all-gather", 0) // 2
        assert flows.get("tensor parallelism", 0) == reduced, (tp, ep)
        assert flows.get("tokens to experts", 0) == sum(s.get("all-to-all", 0) for s in sent) // 4, (tp, ep)
        # A tiny model's first step is largest once its products are compiled, when most activations are gone.
        parts = {a.what: a.nbytes for a in run.phase("steady state").amounts}
        peaks = [rank[k]["peak"] for rank in found]
        assert parts["activations"] + parts["gradients"] == pytest.approx(sum(peaks) / 2, rel=0.1), (tp, ep)
        if tp == 2:  # no ranks are left for FSDP2, and the embedding's gradient stays whole
            (kept,) = [a for a in run.phase("save, sync").amounts if a.what == "gradients"]
            assert {rank[k]["gradients"] for rank in found} == {kept.nbytes}, (tp, ep)
            assert run.largest_gather_bytes == 0


@pytest.mark.needs("plans")
def test_what_goes_between_nodes(moe: Path) -> None:
    """Tensor and expert parallelism stay on a node that has room for them; FSDP's rings leave it."""
    report = sw.plan(moe, ranks=8, nodes=2, tp=2, ep=4, training=CPU)
    assert report.run is not None
    flows = {flow.what: flow for flow in report.run.network}
    assert flows["tensor parallelism"].node_bytes == flows["tokens to experts"].node_bytes == 0
    gathers = flows["FSDP all-gathers"]
    # Dense parameters: 2 rings of 4 ranks, of which a node has 2; experts: 4 rings of 2 ranks.
    assert 2 * gathers.rank_bytes < gathers.node_bytes < 4 * gathers.rank_bytes
    small = sw.plan(moe, ranks=8, nodes=8, tp=2, ep=4, training=CPU).run
    assert small is not None
    assert small.network_bytes_per_step == report.run.network_bytes_per_step
    assert small.node_bytes_per_step == small.network_bytes_per_step  # a rank is a node
    one = sw.plan(moe, ranks=8, tp=2, ep=4, training=CPU).run
    assert one is not None
    assert one.node_bytes_per_step == 0


def test_files_of_ranks_and_nodes(moe: Path) -> None:
    report = sw.plan(moe, ranks=6, nodes=3, training=sw.TrainingSpec(sequence_length=64, bytes_per_s=1e6))
    assert report.run is not None
    files = {one.phase: one for one in report.run.files}
    read = [cost.bytes_read for cost in report.per_rank]
    load = files["load"]
    assert (load.rank_bytes, load.total_bytes) == (max(read), sum(read))
    assert load.node_bytes == max(read[0] + read[1], read[2] + read[3], read[4] + read[5])
    assert load.seconds == load.total_bytes / 1e6
    assert files["save"].total_bytes == report.run.checkpoint.nbytes
    (cached,) = [a for a in report.run.phase("load").amounts if a.where == "page cache"]
    assert cached.nbytes == load.node_bytes // 2
    assert report.run.nodes == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp must be at least 1 and divide the 8 ranks"),
        ({"ep": 3}, "ep must be at least 1, divide the 8 ranks"),
        ({"tp": 4, "ep": 2}, "be a multiple of tp = 4"),
    ],
)
def test_ranks_that_can_not_be_arranged_so(moe: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sw.plan(moe, ranks=8, training=CPU, **options)  # type: ignore[arg-type]


@pytest.mark.needs("plans")
def test_what_the_class_can_not_do_is_named(moe: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="doesn't divide the 4 KV heads"):
        sw.plan(moe, ranks=8, tp=8, training=CPU)
    with pytest.raises(ShardError, match="Cannot evenly shard 8 experts"):
        sw.plan(moe, ranks=16, ep=16, training=CPU)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ShardError, match="GPT2LMHeadModel has no plan for tp=2"):
        sw.plan(tmp_path, ranks=2, tp=2, training=CPU)
