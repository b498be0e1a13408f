"""PEFT models, sharded: the values of plain PEFT on one process, in and out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.errors import CheckpointError, PlanError
from shardwise.sharding.fsdp import describe_groups
from tests.harness import models
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly, nightly_but
from tests.loading import _peft_fns as fns
from tests.loading._load_fns import tensors_of

CONVERTED = pytest.mark.needs(
    "peft!=0.19.*",
    "opens no adapter of a class that transformers 5.8 has conversions for (TypeError, or values left out)",
)


def _marked(kinds: Iterable[Any]) -> list[Any]:
    return [pytest.param(kind, marks=CONVERTED) if kind == "experts" else kind for kind in kinds]


@pytest.mark.parametrize("world_size", [3, *nightly(1, 2)])
@pytest.mark.parametrize(
    "kind", _marked(nightly_but(fns.KINDS, "lora", "dora-transposed", "tied-saved-head", "experts"))
)
def test_equals_plain_peft(ranks: RankPool, tmp_path: Path, kind: str, world_size: int) -> None:
    fns.write_reference(kind, str(tmp_path))
    expected = load_file(tmp_path / "expected.safetensors")
    ranks.run_ranks(world_size, fns.equals_plain_peft, kind, str(tmp_path), str(tmp_path / "out"))
    again = fns.opened(kind, str(tmp_path / "base"), str(tmp_path / "out"))
    for name, tensor in tensors_of(again).items():
        assert torch.equal(tensor.detach(), expected[name]), name


SEEDED = [k for k in fns.KINDS if k not in ("lora", "saved-head", "tied-embedding")]


@pytest.mark.parametrize("kind", nightly_but(SEEDED, "two"))
def test_seeded_alike(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Without files: PEFT's rule, the same values at every world size; what follows from the base as in PEFT."""
    fns.write_reference(kind, str(tmp_path))
    found = {n: ranks.run_ranks(n, fns.seeded, kind, str(tmp_path / "base"))[0] for n in (1, 2, 3)}
    plain = {n: t.detach() for n, t in tensors_of(fns.plain_peft(kind, str(tmp_path / "base"))).items()}
    drawn = []
    for name, value in found[1].items():
        assert torch.equal(value, found[2][name]), name
        assert torch.equal(value, found[3][name]), name
        assert value.dtype == plain[name].dtype, name
        if plain[name].eq(0).all() or not any(f".{p}." in name for p in fns.DRAWN):
            assert torch.equal(value, plain[name]), f"{name}: base, copies, zeros and magnitudes are PEFT's"
        else:
            drawn.append(name)
            assert not torch.equal(value, plain[name])
            assert abs(value.mean()) < 5 * plain[name].std() / value.numel() ** 0.5, name
            ratio = value.std() / plain[name].std()
            assert abs(ratio.log()) < 10 / (2 * value.numel()) ** 0.5, (name, ratio)
    assert drawn
    assert len({found[1][n].flatten()[0].item() for n in drawn}) == len(drawn), "two tensors drawn alike"


TRAINED = [k for k in fns.KINDS if k not in ("renamed-base", "biases")]


@pytest.mark.parametrize("world_size", [2, *nightly(3)])
@pytest.mark.parametrize("kind", _marked(nightly_but(TRAINED, "dora-bf16", "experts")))
def test_trains_as_plain_peft(ranks: RankPool, tmp_path: Path, kind: str, world_size: int) -> None:
    """Frozen parameters beside trainable ones in one FSDP group; adapters in fp32 over a base in bf16."""
    fns.write_reference(kind, str(tmp_path))
    ranks.run_ranks(world_size, fns.trains_as_plain_peft, kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["tied-saved-head", *nightly("lora", "dora")])
def test_a_run_resumes(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    fns.write_reference(kind, str(tmp_path))
    base, runs = str(tmp_path / "base"), str(tmp_path / "runs")
    saved = ranks.run_ranks(2, fns.resumes_exactly, kind, base, runs)
    assert saved[0] == saved[1]
    found = ranks.run_ranks(3, fns.resumes_elsewhere, kind, base, runs)
    assert [digests for digests, _ in found] == [saved[0]] * 3


def test_wrapped_in_other_ways(ranks: RankPool, tmp_path: Path) -> None:
    fns.write_reference("tied-saved-head", str(tmp_path))
    ranks.run_ranks(4, fns.wrapped_in_other_ways, "tied-saved-head", str(tmp_path), str(tmp_path / "out"))


def test_a_base_that_is_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    fns.write_reference("saved-head", str(tmp_path))
    ranks.run_ranks(2, fns.base_from_a_checkpoint, "saved-head", str(tmp_path), str(tmp_path / "runs"))


@pytest.mark.parametrize("kind", [k for k in fns.KINDS if k != "renamed-base"])
def test_adapters_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    """Byte for byte the files of the live model's export, without the base in the checkpoint. An adapter that isn't trained is in it."""
    fns.write_reference(kind, str(tmp_path))
    given = fns.directories(kind, str(tmp_path))
    with fns.known_warnings():
        model = sw.load_pretrained(tmp_path / "base", adapter=given)
    step = tmp_path / "run" / "step-00000001"
    if kind == "tied-embedding":  # PEFT stores the base's embedding with an adapter of it
        sw.save(sw.TrainState(model, frozen="refer"), tmp_path / "referred", step=1)
        with (
            fns.known_warnings(),
            pytest.raises(CheckpointError, match="with tensors of the base needs their"),
        ):
            sw.export_hf(tmp_path / "referred", tmp_path / "none")
    sw.save(sw.TrainState(model, frozen="hold" if kind == "tied-embedding" else "refer"), step, step=1)
    first = next(iter(given))
    for some in (None, first):
        with fns.known_warnings():
            sw.export_hf(model, tmp_path / f"live-{some}", adapters=some)
            sw.export_hf(step, tmp_path / f"stored-{some}", adapters=some)
        live, stored = (
            {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}
            for root in (tmp_path / f"live-{some}", tmp_path / f"stored-{some}")
        )
        assert len(live) == 2 * (len(given) if some is None else 1)
        assert stored == live
    with (
        fns.known_warnings(),
        pytest.raises(ValueError, match="adapters='absent': the model has the adapters"),
    ):
        sw.export_hf(step, tmp_path / "none", adapters="absent")


@pytest.mark.parametrize("world_size", [3, *nightly(1)])
def test_a_plain_module(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    torch.manual_seed(1)
    base = fns.Plain()
    file = models.write_state(models.state_of(base), tmp_path)
    trained = peft.get_peft_model(base, fns.plain_config())
    models.fill_with_noise(trained)
    trained.save_pretrained(tmp_path / "adapter")
    ranks.run_ranks(world_size, fns.plain_module, str(file), str(tmp_path / "adapter"), str(tmp_path / "out"))
    stored = [load_file(tmp_path / d / "adapter_model.safetensors") for d in ("adapter", "out")]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(stored[1][n], t) for n, t in stored[0].items())


@CONVERTED
def test_an_adapter_from_before_its_class_changed(ranks: RankPool, tmp_path: Path) -> None:
    """Names of an older transformers, which PEFT renames when it loads (the language model of a LLaVA)."""
    fns.write_reference("renamed-base", str(tmp_path))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    now, then = "model.language_model.", "language_model.model."
    state = {n.replace(now, then): t for n, t in load_file(file).items()}
    assert any(then in n for n in state)
    save_file(state, file)
    expected = load_file(tmp_path / "expected.safetensors")
    plain = fns.opened("renamed-base", str(tmp_path / "base"), str(tmp_path / "adapter"))
    assert all(torch.equal(t.detach(), expected[n]) for n, t in tensors_of(plain).items())
    ranks.run_ranks(2, fns.equals_plain_peft, "renamed-base", str(tmp_path), str(tmp_path / "out"))
    assert not any(then in n for n in load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_a_new_head(ranks: RankPool, tmp_path: Path) -> None:
    models.write_hub_directory("qwen3", tmp_path, torch.float32)
    found = [v for n in (1, 2, 3) for v in ranks.run_ranks(n, fns.a_new_head, str(tmp_path))]
    for values in found[1:]:
        assert all(torch.equal(t, found[0][n]) for n, t in values.items())


@pytest.mark.parametrize("kind", ["lora", *nightly("tied-embedding")])
def test_a_base_of_the_hub(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    fns.write_reference(kind, str(tmp_path))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "nobody/nothing"}))
    ranks.run_ranks(2, fns.base_of_the_hub, kind, str(tmp_path), str(tmp_path / "out"))
    stored = [load_file(tmp_path / d / "adapter_model.safetensors") for d in ("adapter", "out")]
    assert stored[0].keys() == stored[1].keys()
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "nobody/nothing"
    )


def test_the_files_are_those_of_peft(ranks: RankPool, tmp_path: Path) -> None:
    """Names, dtypes, shapes, config and folders of ``save_pretrained``, for each of two adapters."""
    fns.write_reference("two", str(tmp_path))
    ranks.run_ranks(2, fns.equals_plain_peft, "two", str(tmp_path), str(tmp_path / "out"))
    for folder in ("", "style"):
        theirs, ours = (tmp_path / d / folder for d in ("adapter", "out"))
        stored = [load_file(d / "adapter_model.safetensors") for d in (theirs, ours)]
        assert stored[0].keys() == stored[1].keys()
        assert all(
            stored[1][n].dtype == t.dtype and torch.equal(stored[1][n], t) for n, t in stored[0].items()
        )
        configs = [json.loads((d / "adapter_config.json").read_text()) for d in (theirs, ours)]
        for config in configs:
            config["target_modules"].sort()  # a set, in PEFT's order of the day
        assert configs[0] == configs[1]


_EXPERTS = pytest.mark.needs("peft>=0.20", "lets one adapter of a model have target_parameters")


@pytest.mark.parametrize(
    "kind", ["lora", "dora-transposed", "saved-head", pytest.param("experts", marks=_EXPERTS), "two"]
)
def test_groups_are_those_of_the_base(tmp_path: Path, kind: str) -> None:
    """Adapters lie in the groups of the modules that they adapt, however many there are."""
    models.write_hub_directory(fns.KINDS[kind][0], tmp_path, torch.float32)
    with sw.meta_init():
        base = fns.base_class(kind)(transformers.AutoConfig.from_pretrained(tmp_path))
    expected = [(f"base_model.model.{g.name}", g.kind) for g in describe_groups(base)[:-1]]
    model = fns.on_meta(kind, str(tmp_path))
    with fns.known_warnings(), sw.meta_init():
        for name in ("b", "c"):
            model.add_adapter(name, next(iter(fns.configs(kind).values())))
    assert [(g.name, g.kind) for g in describe_groups(model)] == [*expected, ("", "root")]


def _three_adapters() -> peft.PeftModel:
    """Real, on this process; the last one's rule can't be repeated."""
    base = transformers.Qwen3ForCausalLM(models.hub_model("qwen3")[1])
    given = {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}
    with fns.known_warnings():
        model = peft.get_peft_model(base, peft.LoraConfig(**given), adapter_name="x1")
        model.add_adapter("x2", peft.LoraConfig(**given))
        model.add_adapter(
            "x3", peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="orthogonal")
        )
    return model


def test_values_do_not_depend_on_what_else_is_filled() -> None:
    models_of = [_three_adapters() for _ in range(3)]
    patterns = [["*.lora_*.x1*", "*.lora_*.x2*"], ["*.lora_*.x2*"], ["*.lora_embedding_B.x2"]]
    filled = [sw.init_weights(m, 5, only=names) for m, names in zip(models_of, patterns, strict=True)]
    values = [dict(m.named_parameters()) for m in models_of]
    assert len(filled[0]) == 2 * len(filled[1])
    for k in (1, 2):
        assert all(torch.equal(values[0][n], values[k][n]) for n in filled[k])
    embedding = "base_model.model.model.embed_tokens.lora_embedding_B."
    assert not torch.equal(values[0][f"{embedding}x1"], values[0][f"{embedding}x2"])


def test_a_rule_that_can_not_be_repeated_beside_one_that_can() -> None:
    model = _three_adapters()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sw.init_weights(model, 5, only=["*.q_proj.lora_*.x1*"])
    with pytest.raises(
        PlanError, match="init_lora_weights='orthogonal' of adapter 'x3' can't give the same values"
    ) as caught:
        sw.init_weights(model, 5, only=["*.lora_A.*"])
    assert len(caught.value.problems) == 2, "one for each layer"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (".lora_A.x1" not in name), name


@pytest.mark.processes
@pytest.mark.slow
def test_peft_is_imported_only_where_it_is_used() -> None:
    code = "import sys, shardwise, shardwise.loading.adapters; assert 'peft' not in sys.modules, 'imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
