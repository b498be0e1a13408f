"""The cheapest change that a verdict proposes is made, and the run stays below the limit, which it did not without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import shardwise as sw
from tests.fit import _change_fns
from tests.harness.launch import Launch

RANKS, BATCH, LENGTH = 2, 4, 384
#: glibc would keep freed memory for later, in a part for each thread; as in benchmarks/phases.py.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("change")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def run_of(model: Path, *, checkpointing: bool, limit: int | None = None) -> sw.reports.PlanReport:
    training = sw.TrainingSpec(
        batch_size=BATCH, sequence_length=LENGTH, device="cpu", checkpointing=checkpointing
    )
    options = {"training": training, "host_limit_bytes": limit}
    return sw.plan(model, ranks=RANKS, dtype="float32", **options)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_the_proposed_change_keeps_the_run_below_the_limit(model: Path) -> None:
    changed = run_of(model, checkpointing=True).run
    assert changed is not None
    # No more than the changed run needs in its steps, at the upper ends of its error bars.
    steady = changed.phase("steady state")
    limit = max(changed.needed(changed.phase(name))[1] for name in ("load", "first step", "steady state"))
    verdict = run_of(model, checkpointing=False, limit=changed.host_bytes).verdict
    assert verdict is not None
    assert verdict.outcome == "fits if"
    assert verdict.changes[0].what == "activation checkpointing"
    assert verdict.changes[0].host_bytes == changed.host_bytes
    process = next(a.upper_bytes for a in steady.amounts if a.what == "process")
    allowed = limit // RANKS - process
    with Launch(RANKS, _change_fns.taken, str(model), [True, False], BATCH, LENGTH, env=GIVE_BACK) as launch:
        assert launch.wait(200) == [0] * RANKS
        found = [launch.result(rank) for rank in range(RANKS)]
    for with_change, without in found:
        assert with_change <= allowed < without, (with_change, allowed, without)
