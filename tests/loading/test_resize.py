"""Models with more tokens, or other labels, than are stored: ``vocab_size=`` and ``grow=``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise as sw
from tests.harness.models import fill_with_noise, write_hub_directory
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.loading import _resize_fns as fns
from tests.loading._peft_fns import known_warnings

#: Architecture and whether its embeddings are tied; the quick ones have a head's bias, a buffer, a nested config.
CASES = [(name, tied) for name in fns.ARCHITECTURES for tied in (True, False)]
QUICK = [("bart", True), ("bert", False), ("llava", False), ("gemma3", True)]


def write_cases(cases: list[tuple[str, bool]], root: Path) -> list[str]:
    """The directories of models and of what one process makes of them."""
    found = {root / f"{name}-{'tied' if tied else 'untied'}": (name, tied) for name, tied in cases}
    for directory, (name, tied) in found.items():
        fns.write_case(name, tied=tied, directory=directory)
    return [*map(str, found)]


def check_exports(directories: list[str], out: Path) -> None:
    """What was exported is what one process saves, tensor by tensor, and opens with the new vocabulary."""
    for directory in directories:
        exported, saved = out / Path(directory).name, Path(directory) / "new"
        tensors, expected = (
            {n: v for f in folder.glob("*.safetensors") for n, v in load_file(f).items()}
            for folder in (exported, saved)
        )
        configs = [json.loads((folder / "config.json").read_text()) for folder in (exported, saved)]
        assert configs[0] == configs[1]
        # A tied tensor may be stored under each of its names.
        for name in expected:
            assert torch.equal(tensors[name], expected[name]), (directory, name)
        model = fns.ordinary_model(str(exported))
        assert model.get_input_embeddings().weight.shape[0] == fns.NEW
        assert torch.equal(fns.forward(model), fns.forward(fns.resized(directory)))


def compare(ranks: RankPool, world_size: int, cases: list[tuple[str, bool]], root: Path) -> None:
    directories = write_cases(cases, root)
    said = ranks.run_ranks(
        world_size, fns.grown_equal_ordinary, directories, str(root / "out"), timeout_s=400
    )
    for directory in directories:
        lines = said[0][directory]
        assert all(f"({fns.OLD} of {fns.NEW} rows stored, the others: " in line for line in lines)
        buffers = [line for line in lines if line.endswith("built)")]
        assert bool(buffers) == Path(directory).name.startswith("bart")
    check_exports(directories, root / "out")


@pytest.mark.parametrize("world_size", [2, *nightly(1, 3)])
def test_a_few_architectures(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    compare(ranks, world_size, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_architecture(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """As ``resize_token_embeddings`` on one process, then ``save_pretrained``: twelve architectures, tied or not."""
    compare(ranks, world_size, CASES, tmp_path)


@pytest.mark.parametrize("rule", ["mean", "init"])
def test_more_labels(ranks: RankPool, tmp_path: Path, rule: str) -> None:
    torch.manual_seed(5)
    model = transformers.BertForSequenceClassification(fns.classifier(3))
    fill_with_noise(model)
    model.save_pretrained(tmp_path)
    found = [ranks.run_ranks(n, fns.more_labels, str(tmp_path), rule)[0] for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def test_any_module(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(6)
    stored = {"0.weight": torch.randn(7, 5), "1.weight": torch.randn(4, 5), "1.bias": torch.randn(4)}
    stored["0.weight"][2] = torch.tensor([torch.inf, torch.nan, 1e38, 1e-40, 0.0])
    file = tmp_path / "stored.safetensors"
    save_file(stored, file)
    torch.save(stored, f"{file}.expected")
    for world_size in (1, 3):
        ranks.run_ranks(world_size, fns.in_place, str(file))


# ----------------------------------------------------------------------------------------------------
# Trained, saved, resumed, exported

IDS = torch.tensor([[1, 5, fns.OLD, fns.NEW - 1, 7]])


@pytest.mark.parametrize("tied", [False, *nightly(True)])
def test_resume_on_other_ranks(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    """Once it's there, a grown model is any other one: two ranks save it, three resume it, and its export opens."""
    fns.write_case("qwen2", tied=tied, directory=tmp_path)
    digests, loss = ranks.run_ranks(2, fns.saves, str(tmp_path))[0]
    found, other = ranks.run_ranks(3, fns.resumes, str(tmp_path))[0]
    assert found == digests
    assert other == pytest.approx(loss, rel=1e-2 if tied else 1e-5)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.config.vocab_size == fns.NEW
    assert sw.digest(exported) == digests


@pytest.mark.parametrize("tied", [False, *nightly(True)])
def test_resume_with_more_tokens(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    """A run that was saved with fewer tokens: the optimizer's states of new rows are zeros."""
    fns.write_case("qwen2", tied=tied, directory=tmp_path)
    before = ranks.run_ranks(2, fns.saves_small, str(tmp_path))[0]
    after = ranks.run_ranks(3, fns.resumes_with_more_tokens, str(tmp_path))[0]
    assert after.keys() == before.keys()
    for name, old in before.items():
        now = after[name]
        assert torch.equal(now[: len(old)] if old.dim() else now, old), name
        assert not now.dim() or not now[len(old) :].any(), name
    assert {len(now) for name, now in after.items() if now.shape != before[name].shape} == {fns.NEW}


def test_adapters_with_new_tokens(ranks: RankPool, tmp_path: Path) -> None:
    """Copies of embeddings and head (``modules_to_save``) are grown, trained, saved, resumed and exported as those of PEFT."""
    fns.write_case("qwen2", tied=False, directory=tmp_path)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    ranks.run_ranks(2, fns.copies_of_modules, str(tmp_path), adapter)
    digests, loss = ranks.run_ranks(2, fns.saves, str(tmp_path), adapter)[0]
    for world_size in (2, 3):
        found, other = ranks.run_ranks(world_size, fns.resumes, str(tmp_path), adapter)[0]
        assert found == digests
        assert other == pytest.approx(loss, rel=1e-5)
    assert ranks.run_ranks(2, fns.reopens, str(tmp_path))[0] == digests
    with known_warnings():
        opened = peft.PeftModel.from_pretrained(fns.resized(str(tmp_path)), tmp_path / "out")
        live = sw.load_pretrained(tmp_path / "old", vocab_size=fns.NEW, adapter=tmp_path / "out")
    assert torch.equal(opened(input_ids=IDS).logits, live(input_ids=IDS).logits)


# ----------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    write_hub_directory("qwen3", directory, torch.float32)
    return directory


def test_fewer_tokens_are_refused(base: Path) -> None:
    with pytest.raises(
        sw.errors.PlanError, match="it has 101 tokens, but the model has 100, and a load drops"
    ):
        sw.load_pretrained(base, vocab_size=100)


def test_as_many_tokens_change_nothing(base: Path) -> None:
    model, report = sw.load_pretrained(base, vocab_size=101, return_report=True)
    assert report.grown == ()
    assert model.config.vocab_size == 101


def test_a_class_without_tokens_is_refused(tmp_path: Path) -> None:
    write_hub_directory("vit", tmp_path, torch.float32)
    with pytest.raises(ValueError, match=r"vocab_size=200: the config \(ViTConfig\) has no number of tokens"):
        sw.load_pretrained(tmp_path, vocab_size=200)


def test_rules_are_checked(base: Path) -> None:
    with pytest.raises(ValueError, match="expected 'mean' or 'init'"):
        sw.load_pretrained(base, vocab_size=200, grow={"*": "median"})
    with pytest.raises(TypeError, match="expected a mapping of patterns to rules"):
        sw.load_pretrained(base, vocab_size=200, grow="mean")  # type: ignore[arg-type]


def test_nothing_else_may_grow(tmp_path: Path) -> None:
    """What was not declared is a mismatch as before, and so are fewer rows, other columns, and integers."""
    file = tmp_path / "stored.safetensors"
    save_file({"weight": torch.randn(4, 5), "bias": torch.randn(4)}, file)
    model = nn.Linear(5, 6)
    with pytest.raises(sw.errors.PlanError) as refused:
        sw.load(model, file, grow={"weight": "mean"})
    assert len(refused.value.problems) == 1
    assert "grow={'bias': 'mean'}" in refused.value.problems[0]
    for other in (nn.Linear(5, 3), nn.Linear(7, 6), nn.Linear(7, 4)):
        with pytest.raises(sw.errors.PlanError, match="shape mismatch: 'weight'"):
            sw.load(other, file, grow={"*": "mean"})
    model = nn.Linear(5, 6)
    model.weight = nn.Parameter(torch.zeros(6, 5, dtype=torch.int8), requires_grad=False)
    with pytest.raises(sw.errors.PlanError, match="shape mismatch: 'weight'"):
        sw.load(model, file, grow={"*": "mean"})


def test_patterns_come_before_the_vocabulary(base: Path, tmp_path: Path) -> None:
    """Under any name of a tensor: the base's, and a tied one."""
    with known_warnings():
        adapted = sw.load_pretrained(
            base,
            vocab_size=128,
            grow={"lm_head.*": "init"},
            adapter=peft.LoraConfig(target_modules=["q_proj"]),
        )
    report = sw.reports.load_report(adapted)
    assert report is not None
    rules = {one.name.rpartition("model.")[2]: one.rule for one in report.grown}
    assert rules == {"embed_tokens.weight": "mean", "lm_head.weight": "init"}
    config = transformers.AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    tied = transformers.AutoModelForCausalLM.from_config(config)
    fill_with_noise(tied)
    tied.save_pretrained(tmp_path)
    _, report = sw.load_pretrained(
        tmp_path, vocab_size=128, grow={"lm_head.weight": "init"}, return_report=True
    )
    assert [one.rule for one in report.grown] == ["init"]


@pytest.mark.parametrize("rule", ["mean", "init"])
def test_magnitudes_are_norms_of_new_rows_too(base: Path, rule: Literal["mean", "init"]) -> None:
    config = peft.LoraConfig(use_dora=True, target_modules=["lm_head"])
    with known_warnings():
        model = sw.load_pretrained(base, vocab_size=128, grow={"*": rule}, adapter=config)
    head = model.base_model.model.lm_head
    norms = torch.linalg.norm(head.base_layer.weight, dim=1)
    torch.testing.assert_close(head.lora_magnitude_vector["default"].weight, norms)


def test_state_that_cannot_grow_is_named(tmp_path: Path) -> None:
    """Before anything is changed."""

    def life(rows: int) -> sw.TrainState:
        model = nn.Linear(5, rows)
        optimizer = transformers.Adafactor(
            model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False
        )
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return sw.TrainState(model, optimizer)

    sw.save(life(4), tmp_path / "step")
    state = life(6)
    before = sw.digest(state.models["model"])
    with pytest.raises(sw.errors.StateError, match=r"weight.*isn't shaped like its parameter"):
        sw.restore(state, tmp_path / "step", grow={"*": "mean"})
    assert sw.digest(state.models["model"]) == before


def test_a_plan_says_it(base: Path) -> None:
    report = sw.plan(base, ranks=2, vocab_size=128)
    assert [one.name for one in report.grown] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert "(101 of 128 rows stored, the others: mean)" in str(report)
