"""Plans of public models from their configs alone, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import shardwise as sw
from shardwise.fit import step as measure
from shardwise.internals.torch import fake_tensors
from tests.harness.tiers import nightly

CONFIGS = Path(__file__).parent / "configs"
#: Parameters, as their publishers count them or as the class builds them.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
}
REST = ("llama-3-70b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-120b")


def planned(name: str, ranks: int, **options: object) -> sw.reports.PlanReport:
    training = sw.TrainingSpec(sequence_length=512, checkpointing=True)
    return sw.plan(CONFIGS / f"{name}.json", ranks=ranks, nodes=-(-ranks // 8), training=training, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", *nightly("gpt-oss-20b", *REST)])
def test_sizes(name: str) -> None:
    report = planned(name, 8)
    assert report.from_config
    assert report.run is not None
    narrow = 2 * PARAMETERS[name]
    # DeepSeek's router biases are buffers, in fp32; from transformers 5.24 its routers' weights are in fp32, too.
    routers = narrow // 4096
    assert narrow <= report.model_bytes < narrow + routers + 2**20
    assert narrow <= report.total_shard_bytes < narrow + routers + 2**23  # buffers are whole on every rank
    assert report.run.checkpoint.nbytes >= 3 * narrow
    assert not any("with a formula" in text for text in report.run.assumptions)


@pytest.mark.nightly
@pytest.mark.needs("transformers>=5.3", "has no Qwen3.5")
def test_35b_over_three_ranks() -> None:
    auto_class = transformers.Qwen3_5MoeForCausalLM
    report = planned("qwen3.5-35b-a3b", 3, auto_class=auto_class)
    assert round(report.model_bytes / 3 / 1e9, 1) == 23.1  # without the vision tower
    # 256 experts over three ranks: rank 0 holds 86 of each layer.
    assert report.max_shard_bytes / report.model_bytes == pytest.approx(86 / 256, rel=0.002)


def test_a_trillion_parameters_over_1024_ranks() -> None:
    report = planned("kimi-k2", 1024, auto_class=transformers.DeepseekV3ForCausalLM)
    assert report.run is not None
    assert report.model_bytes > 2e12
    # 384 experts over 1,024 ranks: FSDP2 pads them to 1,024.
    assert report.run.largest_gather_bytes > 2.6 * 2 * 384 * 3 * 7168 * 2048


def test_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((CONFIGS / "llama-3-8b.json").read_bytes())
    assert sw.plan(tmp_path, ranks=2).run is None
    directory = sw.plan(tmp_path, ranks=2, training=sw.TrainingSpec(sequence_length=128))
    file = sw.plan(CONFIGS / "llama-3-8b.json", ranks=2, training=sw.TrainingSpec(sequence_length=128))
    assert directory.run == file.run
    assert directory.dtypes == ("BF16",)


def test_a_config_without_weights_says_the_dtype_of_its_files() -> None:
    own, wide = (sw.plan(CONFIGS / "llama-3-8b.json", ranks=2, dtype=d) for d in ("auto", torch.float32))
    assert wide.model_bytes == 2 * own.model_bytes
    assert wide.source_bytes == wide.total_bytes_read == own.source_bytes == own.model_bytes
    assert wide.per_rank[0].staging_bytes > 0, "what is read is cast"


def test_a_training_in_other_dtypes() -> None:
    narrow = planned("llama-3-8b", 8).run
    wide = planned("llama-3-8b", 8, dtype=torch.float32).run
    assert narrow is not None
    assert wide is not None
    parts = [{a.what: a.nbytes for a in run.phase("save, sync").amounts} for run in (narrow, wide)]
    for what in ("parameters", "gradients", "optimizer state"):
        assert parts[1][what] == pytest.approx(2 * parts[0][what], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.needs("transformers>=5.3", "has no Qwen3.5")
def test_views_made_without_torch_s_rules_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs() -> list[object]:
        return [
            sw.plan(CONFIGS / "qwen3.5-35b-a3b.json", ranks=2, training=training, auto_class=auto_class).run
            for training in trainings
        ]

    auto_class = transformers.Qwen3_5MoeForCausalLM
    # 65 tokens: the second chunk of the linear attention is padded.
    trainings = [sw.TrainingSpec(sequence_length=65, checkpointing=on) for on in (True, False)]
    fast = runs()
    monkeypatch.setattr(measure, "fake_device_or_view", lambda *_: None)
    assert fast == runs()


def test_a_view_of_a_known_value_is_known() -> None:
    with fake_tensors(), measure.LiveBytes(iter(()), widen=False):
        value = torch.tensor(3)  # torch keeps the values of single elements
        assert int(value.view(1)) == 3
