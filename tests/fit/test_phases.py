"""What a plan says of a run's phases, against torch's own tracker of memory, and what a verdict promises."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwise as sw
from shardwise.fit.groups import Products, groups_of, products_of
from shardwise.fit.network import step_of
from shardwise.internals.torch import fake_store
from shardwise.internals.transformers import build_from_config, one_sequence_a_sample
from tests.harness.tiers import nightly_rows

QWEN = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "dtype": "bfloat16",
}
MIXED = sw.ShardPolicy(mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config and no weights."""
    directory = tmp_path_factory.mktemp("phases")
    transformers.Qwen3Config(**QWEN, architectures=["Qwen3ForCausalLM"]).save_pretrained(directory)
    return directory


def run_of(config: Path, training: sw.TrainingSpec, ranks: int = 4, **options: Any) -> Any:
    report = sw.plan(config, ranks=ranks, training=training, **options)
    assert report.run is not None
    return report.run


def parts(phase: Any) -> dict[str, int]:
    return {a.what: a.nbytes for a in phase.amounts}


# ----------------------------------------------------------------------------------------------------
# Parameters, gradients, optimizer state


def test_what_stays_follows_from_the_parameters(config: Path) -> None:
    parameters = sum(p.numel() for p in model_on_meta().parameters())
    for optimizer, bytes_each in (("adamw", 4), ("momentum", 2), ("sgd", 0)):
        at_rest = parts(run_of(config, sw.TrainingSpec(optimizer=optimizer)).phase("save, sync"))  # type: ignore[arg-type]
        assert at_rest["parameters"] == at_rest["gradients"] == parameters * 2 // 4
        assert at_rest["optimizer state"] == pytest.approx(parameters * bytes_each // 4, abs=1000)
    eight = parts(run_of(config, sw.TrainingSpec(optimizer="adamw8bit")).phase("save, sync"))
    assert eight["optimizer state"] == pytest.approx(parameters * 2 // 4, rel=0.03)


def test_an_async_save_adds_a_copy_of_the_state(config: Path) -> None:
    training = sw.TrainingSpec(sequence_length=128)
    run = run_of(config, training)
    steady, saving = parts(run.phase("steady state")), run.phase("save, async")
    (copy,) = [a for a in saving.amounts if a.what == "staging" and "copy" in a.formula]
    assert copy.where == "host"
    assert copy.nbytes == steady["parameters"] + 2 * steady["parameters"] + 4 * 69
    small = run_of(config, replace(training, max_staging_bytes=2**20)).phase("save, async")
    assert saving.nbytes("host") - small.nbytes("host") == copy.nbytes - 2**20


def test_host_and_device_are_one_pool_where_they_share_memory(config: Path) -> None:
    training = sw.TrainingSpec(sequence_length=128)
    apart = run_of(config, training, nodes=2)
    shared = run_of(config, replace(training, device="unified"), nodes=2)
    phase = apart.phase("steady state")
    device, host = apart.needed(phase)
    assert shared.needed(shared.phase("steady state")) == (device + host // 2, 2 * device + host)
    on_cpu = run_of(config, replace(training, device="cpu"))
    assert on_cpu.device_bytes == 0


def test_offload_moves_the_state_to_the_host(config: Path) -> None:
    run = run_of(config, sw.TrainingSpec(sequence_length=128), policy=sw.ShardPolicy(cpu_offload=True))
    places = {a.what: a.where for a in run.phase("steady state").amounts}
    assert places["parameters"] == places["optimizer state"] == places["gradients"] == "host"
    assert places["activations"] == "device"
    # The device needs most in the forward or backward, the host when the optimizer steps.
    at_most = {a.what: a.nbytes for a in run.phase("steady state").amounts}
    assert at_most["gradients"] == sum(p.nbytes for p in model_on_meta().parameters()) // 4
    assert "optimizer's temporaries" in at_most


# ----------------------------------------------------------------------------------------------------
# A step, against torch's tracker


def built(kind: str) -> tuple[Any, Any]:
    """The class and the config of a kind of model."""
    if kind == "moe":
        experts = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
        return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**QWEN, **experts)
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**QWEN, tie_word_embeddings=kind == "tied")


def model_on_meta(kind: str = "dense") -> Any:
    model_class, config = built(kind)
    with sw.meta_init():
        model = model_class(config)
    return model.to(torch.bfloat16)


def tracked(kind: str, ranks: int, replicas: int, policy: sw.ShardPolicy, training: sw.TrainingSpec) -> int:
    """Peak bytes of a step beside parameters, by ``FSDPMemTracker`` under fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        with FakeTensorMode(allow_non_fake_inputs=True), one_sequence_a_sample():
            model = build_from_config(*built(kind), torch.bfloat16)
            if training.checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            sw.shard(model, mesh, policy)
            own = sum(p.to_local().nbytes for p in model.parameters())
            ids = torch.zeros(training.batch_size, training.sequence_length, dtype=torch.int64)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((ids,))
            with tracker, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.train()
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        dist.destroy_process_group()
    return int(peak) - own


@pytest.mark.parametrize(
    ("kind", "ranks", "replicas", "policy", "training"),
    [
        (
            "dense",
            3,
            1,
            sw.ShardPolicy(),
            sw.TrainingSpec(batch_size=2, sequence_length=128, checkpointing=True),
        ),
        ("tied", 4, 1, sw.ShardPolicy(), sw.TrainingSpec(batch_size=2, sequence_length=128)),
        ("moe", 8, 2, MIXED, sw.TrainingSpec(batch_size=2, sequence_length=128)),
        *nightly_rows(
            ("dense", 8, 2, MIXED, sw.TrainingSpec(batch_size=2, sequence_length=128)),
            ("dense", 4, 1, sw.ShardPolicy(), sw.TrainingSpec(batch_size=2, sequence_length=64)),
            ("dense", 4, 1, sw.ShardPolicy(), sw.TrainingSpec(batch_size=4, sequence_length=256)),
            (
                "dense",
                2,
                1,
                sw.ShardPolicy(reshard_after_forward=False),
                sw.TrainingSpec(sequence_length=128),
            ),
        ),
    ],
)
def test_steps_take_what_torch_tracks(
    kind: str, ranks: int, replicas: int, policy: sw.ShardPolicy, training: sw.TrainingSpec
) -> None:
    step = step_of(model_on_meta(kind), policy, ranks // replicas, training, replicas=replicas)
    expected = tracked(kind, ranks, replicas, policy, training)
    assert step.peak.total_bytes == pytest.approx(expected, rel=0.05)


# ----------------------------------------------------------------------------------------------------
# What CPU ranks take besides


def test_products_of_experts_are_compiled_for_each_number_of_tokens() -> None:
    training = sw.TrainingSpec(batch_size=2, sequence_length=256)
    model = model_on_meta("moe")
    groups = groups_of(model, sw.ShardPolicy(), 4)
    assert products_of(model, groups, torch.float32, training) is None
    found = products_of(model, groups, None, training)
    # Two matrices, each with a product of the forward and two of the backward; 6 layers of 16 experts.
    assert found == Products(
        dense=0, shapes=6, forward_shapes=2, layers=6, experts=16, tokens=512, tokens_of_expert=128.0
    )
    assert 6 * 48 < found.after_one_step() < 6 * 96
    assert found.so_far(5, 0, 0) == 5
    # The numbers of a layer are drawn apart from those of the others, and equal ones share their code.
    assert 2 * 10 < found.so_far(0, 1, 0) < 2 * 16
    assert found.so_far(0, 6, 6) == pytest.approx(3 * found.so_far(0, 6, 0), abs=2)
    assert replace(found, tokens_of_expert=512.0).after_one_step() == 6  # every expert gets every token
    assert found.after_many_steps() == 1024  # what oneDNN keeps
    assert replace(found, tokens=64).after_many_steps() == 6 * 64
    model.requires_grad_(False)
    frozen = products_of(model, groups_of(model, sw.ShardPolicy(), 4), None, training)
    assert frozen is not None
    assert frozen.shapes == 4


def test_parameters_that_text_does_not_reach_have_no_gradients(tmp_path: Path) -> None:
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64}
    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, architectures=["Qwen2_5_VLForConditionalGeneration"]
    )
    config.save_pretrained(tmp_path)
    run = run_of(tmp_path, sw.TrainingSpec(sequence_length=64, device="cpu"), ranks=1, dtype="float32")
    with sw.meta_init():
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    towers = sum(p.nbytes for name, p in model.named_parameters() if ".visual." in name)
    amounts = {a.what: a for a in run.phase("save, sync").amounts}
    parameters, gradients = amounts["parameters"], amounts["gradients"]
    assert towers > 0
    assert gradients.nbytes == parameters.nbytes - towers
    assert gradients.upper_bytes == parameters.upper_bytes  # with images


# ----------------------------------------------------------------------------------------------------
# The verdict


def test_a_change_that_a_verdict_proposes_fits_when_it_is_planned(config: Path) -> None:
    training = sw.TrainingSpec(batch_size=8, sequence_length=512)
    needed = run_of(config, training).device_bytes
    fits = sw.plan(config, ranks=4, training=training, device_limit_bytes=needed).verdict
    assert fits is not None
    assert (fits.outcome, fits.binds, fits.changes) == ("fits", (), ())
    limit = needed - 1
    verdict = sw.plan(config, ranks=4, training=training, device_limit_bytes=limit).verdict
    assert verdict is not None
    assert verdict.outcome == "fits if"
    need, first = verdict.binds[0], verdict.changes[0]
    assert (need.where, need.needed_bytes, need.limit_bytes) == ("device", needed, limit)
    assert first.what == "activation checkpointing"
    changed = run_of(config, replace(training, checkpointing=True))
    assert first.device_bytes == changed.device_bytes <= limit


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's
def test_nothing_helps_against_what_is_too_small(config: Path) -> None:
    training = sw.TrainingSpec(sequence_length=64)
    verdict = sw.plan(config, ranks=4, training=training, device_limit_bytes=2**20).verdict
    assert verdict is not None
    assert verdict.outcome == "does not fit"
    assert {need.phase for need in verdict.binds} >= {"build", "load", "steady state", "export"}
    host = sw.plan(config, ranks=4, training=training, host_limit_bytes=2**30).verdict
    assert host is not None
    assert {need.where for need in host.binds} == {"host"}


def test_a_model_that_looks_at_values_is_planned_by_a_formula(tmp_path: Path) -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
    )
    config.architectures = ["SwitchTransformersForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    run = run_of(tmp_path, sw.TrainingSpec(sequence_length=128))
    assert any("with a formula" in text for text in run.assumptions)
    (activations,) = [a for a in run.phase("steady state").amounts if a.what == "activations"]
    assert activations.upper_bytes == 2 * activations.nbytes > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"optimizer": "lion"},
        {"device": "tpu"},
        {"max_staging_bytes": 0},
        {"bytes_per_s": 0},
    ],
)
def test_wrong_trainings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sw.TrainingSpec(**wrong)


def test_a_limit_needs_a_training(config: Path) -> None:
    with pytest.raises(ValueError, match="training="):
        sw.plan(config, ranks=2, device_limit_bytes=1)


def test_a_device_keeps_no_matrix_of_tokens_for_narrow_values(tmp_path: Path) -> None:
    """DeepSeek-V3's values have 128 features and its keys 192; only the CPU has no fused kernel for that."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**sizes, **heads, architectures=["DeepseekV3ForCausalLM"])
    assert config.v_head_dim < config.qk_nope_head_dim + config.qk_rope_head_dim
    config.save_pretrained(tmp_path)

    def activations(device: str, tokens: int) -> int:
        training = sw.TrainingSpec(sequence_length=tokens, device=device)  # type: ignore[arg-type]
        return parts(run_of(tmp_path, training).phase("steady state"))["activations"]

    assert activations("cuda", 2048) < 2.2 * activations("cuda", 1024)
    assert activations("cpu", 2048) > 3 * activations("cpu", 1024)


@pytest.mark.parametrize(
    ("floor", "shards", "expected"),
    [(10, 500, 8), (10, 60, 1), (10, 3000, 48), (75, 3000, 768), (90, 100, None)],
)
def test_the_smallest_number_of_ranks(floor: int, shards: int, expected: int | None) -> None:
    """Of a run that takes a part that every rank has and shards: compared with trying every number."""
    from types import SimpleNamespace

    from shardwise.fit.verdict import _SIZES, Limits, smallest_ranks

    planned: list[int] = []

    def needed(ranks: int) -> int:
        return floor + -(-shards // ranks)

    def plan(ranks: int) -> Any:
        planned.append(ranks)
        phase = SimpleNamespace(
            name="steady state", amounts=[SimpleNamespace(where="device", upper_bytes=1, what="x")]
        )
        return SimpleNamespace(
            phases=[phase], device_bytes=needed(ranks), is_unified=False, needed=lambda _: (needed(ranks), 0)
        )

    found = smallest_ranks(plan, Limits(80, None), unit=1)
    assert found.ranks == expected
    assert found.ranks == next((n for n in _SIZES if needed(n) <= 80), None)
    assert len(planned) == len(set(planned)) <= 6, "few numbers are planned"
    if expected is not None and expected > 1:
        assert found.below is not None
        assert found.below.ranks == _SIZES[_SIZES.index(expected) - 1], (
            "and the one below is known not to fit"
        )


def test_padded_experts_do_not_end_the_search() -> None:
    """256 experts over 192 ranks are padded to 384, so that it takes more there than a + b / ranks says."""
    from types import SimpleNamespace

    from shardwise.fit.verdict import Limits, smallest_ranks

    def needed(ranks: int) -> int:
        return 10 + 6_000 // ranks + -(-256 // ranks) * ranks * 40 // 256

    def plan(ranks: int) -> Any:
        phase = SimpleNamespace(
            name="steady state", amounts=[SimpleNamespace(where="device", upper_bytes=1, what="x")]
        )
        return SimpleNamespace(
            phases=[phase], device_bytes=needed(ranks), is_unified=False, needed=lambda _: (needed(ranks), 0)
        )

    assert needed(192) > 80 >= needed(256) > 70
    found = smallest_ranks(plan, Limits(80, None), unit=1)
    assert found.ranks == 256, [(one.ranks, one.device_bytes) for one in found.tried]


def test_a_step_is_measured_once_for_all_numbers_of_ranks(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for an optimizer: every rank computes the same. And the load of every rank is planned once, at the end."""
    from shardwise.fit import network as activations
    from shardwise.fit import plan as of_plan

    measured, planned = [], []

    def measure(model: Any, groups: Any, training: sw.TrainingSpec, *rest: Any, **options: Any) -> Any:
        measured.append((training.batch_size, training.checkpointing))
        return own_measure(model, groups, training, *rest, **options)

    def plan_load(*args: Any, **options: Any) -> Any:
        planned.append(options["rank"])
        return own_plan_load(*args, **options)

    own_measure, own_plan_load = activations.measure, of_plan.plan_load
    monkeypatch.setattr(activations, "measure", measure)
    monkeypatch.setattr(of_plan, "plan_load", plan_load)
    training = sw.TrainingSpec(sequence_length=64)
    (limit,) = (
        run.device_bytes for run in [sw.plan(config, ranks=2, training=training).run] if run is not None
    )
    measured.clear()
    planned.clear()
    report = sw.plan(config, device_limit_bytes=limit, training=training)
    assert report.search is not None
    assert report.search.ranks == 2
    assert len(report.search.tried) > 1
    assert measured == [(1, False)]
    assert len(planned) <= 2 * len(report.search.tried) + report.ranks
