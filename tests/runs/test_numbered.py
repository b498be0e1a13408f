"""Optimizers that number their parameters: of a plain HF Trainer, of Accelerate without FSDP; and odd values in an optimizer's state."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import ShardwiseError, StateError
from tests.harness.command import runner


def qwen() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return transformers.Qwen3ForCausalLM(config)


def trainer(root: Path, model: Any, **more: Any) -> transformers.Trainer:
    """As its users make it: two groups, one of them without weight decay."""
    arguments = transformers.TrainingArguments(
        str(root), use_cpu=True, report_to=[], disable_tqdm=True, weight_decay=0.1, learning_rate=1e-2, **more
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 31, (16, 6))]
    return transformers.Trainer(model, arguments, train_dataset=rows)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder that a plain Trainer saved, its model, and its optimizer."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("plain")
    made = trainer(root, qwen(), max_steps=3, save_steps=3, per_device_train_batch_size=2)
    made.train()
    return root / "checkpoint-3", made.model, getattr(made.optimizer, "optimizer", made.optimizer)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {f"{n}.{k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}


def test_a_plain_trainers_checkpoint_is_restored_with_its_optimizer(
    trained: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    root, model, optimizer = trained
    again = qwen()
    made = trainer(tmp_path, again)
    report = sw.restore(sw.TrainState(model=again, optimizer=made.create_optimizer()), root)
    assert (report.step, report.exact) == (3, False)
    assert any("matched by position" in line for line in report.differences)
    expected, found = states(model, optimizer), states(again, made.optimizer)
    assert found.keys() == expected.keys()
    assert len(found) == 3 * len(list(model.parameters()))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert [g["weight_decay"] for g in made.optimizer.param_groups] == [0.1, 0.0]
    one_group = torch.optim.AdamW(again.parameters())
    with pytest.raises(
        StateError, match=r"by parameter index, in groups of \[16, 9\]; this run's has groups of \[25\]"
    ):
        sw.restore(sw.TrainState(model=again, optimizer=one_group), root)


def diff_lines(*paths: Path, status: int) -> str:
    shown = runner().invoke(main, ["diff", *map(str, paths)], prog_name="shardwise")
    assert shown.exit_code == status, shown.output
    return " ".join(shown.stdout.split())


def test_diff_compares_a_plain_trainers_optimizers(trained: tuple[Path, Any, Any], tmp_path: Path) -> None:
    root, model, optimizer = trained
    other = shutil.copytree(root, tmp_path / "other")
    same = sw.diff(root, other)
    assert (same.ok, same.not_compared) == (True, ())
    assert same.equal == len(model.state_dict()) + len(states(model, optimizer))
    assert diff_lines(root, other, status=0).endswith("no differences")
    stored = torch.load(root / "optimizer.pt", weights_only=True)
    stored["state"][3]["exp_avg"][0] += 1
    stored["param_groups"][1]["lr"] = 0.5
    torch.save(stored, other / "optimizer.pt")
    report = sw.diff(root, other)
    assert [(c.name, c.what.partition(":")[0]) for c in report.changed] == [
        ("optimizer:group 1.lr", "setting"),
        ("optimizer:3.exp_avg", "content"),
    ]
    assert report.changed[0].what.endswith(" and 0.5")
    assert diff_lines(root, other, status=1).endswith("they differ")


def test_diff_says_which_optimizers_it_does_not_compare(
    trained: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    root, model, _ = trained
    other = shutil.copytree(root, tmp_path / "other")
    (other / "optimizer.pt").unlink()
    for pair in ((root, other), (other, root)):
        report = sw.diff(*pair)
        assert (report.ok, report.equal) == (True, len(model.state_dict()))
        assert report.not_compared == (f"optimizer: {root} contains one, and {other} doesn't",)
        assert diff_lines(*pair, status=0).endswith("no differences in what was compared")
    assert report.to_json()["not_compared"] == report.not_compared
    (other / "optimizer.pt").write_bytes(b"not a torch file")
    (why,) = sw.diff(root, other).not_compared
    assert why.startswith(f"optimizer: {other / 'optimizer.pt'}: ")
    (other / "optimizer.pt").unlink()
    (other / "global_step3").mkdir()
    (why,) = sw.diff(root, other).not_compared
    assert "global_step3 of DeepSpeed can't be" in why
    sw.convert(root, tmp_path / "ours")
    report = sw.diff(root, tmp_path / "ours")
    assert report.ok
    (why,) = report.not_compared
    assert "by parameter index" in why
    assert "in shardwise's format" in why


def as_lines(*words: object) -> tuple[str, dict[str, Any]]:
    """What a conversion prints, and its document."""
    given = [str(word) for word in words]
    shown = runner().invoke(main, ["convert", *given, "--to", "checkpoint"], prog_name="shardwise")
    assert shown.exit_code == 0, shown.output
    given[1] += "-json"
    told = runner().invoke(main, ["convert", *given, "--to", "checkpoint", "--json"], prog_name="shardwise")
    return " ".join(shown.stdout.split()), json.loads(told.stdout)


def test_a_conversion_gives_the_trainers_numbers_their_names(
    trained: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    """By the Trainer's own rule of weight decay; every other file that is left out is named."""
    root, model, optimizer = trained
    text, report = as_lines(root, tmp_path / "out")
    assert report["optimizer_tensors"] == 3 * len(list(model.parameters()))
    assert "optimizer.pt numbers its parameters; their names were taken from the HF Trainer's groups" in text
    assert "by this rank" not in text, "there is one"
    named = {line.partition(":")[0] for line in report["skipped"]}
    stored = {file.name for file in root.iterdir()}
    read = {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
    }
    assert stored - read <= named
    assert "optimizer.pt" not in named
    again = qwen()
    made = trainer(tmp_path, again).create_optimizer()
    sw.restore(sw.TrainState(model=again, optimizer=made), tmp_path / "out")
    expected, found = states(model, optimizer), states(again, made)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("groups", ["one", "reversed", "three"])
def test_numbers_are_given_names_only_where_the_model_s_order_fits(
    trained: tuple[Path, Any, Any], tmp_path: Path, groups: str
) -> None:
    """An Accelerate directory with a config: its shapes fit the model's order, or the optimizer is named as left out."""
    root, *_ = trained
    accelerator = Accelerator(cpu=True)
    model = qwen()
    parameters = list(model.parameters())
    asked: Any = {
        "one": parameters,
        "reversed": parameters[::-1],
        "three": [{"params": parameters[k::3]} for k in range(3)],
    }[groups]
    optimizer = torch.optim.AdamW(asked)
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    optimizer.step()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    text, report = as_lines(tmp_path / "state", tmp_path / "out", "--config", root)
    if groups == "one":
        assert report["optimizer_tensors"] == 3 * len(parameters)
        assert "the order of model.parameters()" in report["caveats"][0]
        again = qwen()
        taken = torch.optim.AdamW(again.parameters())
        sw.restore(sw.TrainState(model=again, optimizer=taken), tmp_path / "out")
        expected, found = states(model, optimizer.optimizer), states(again, taken)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        return
    assert (report["optimizer_tensors"], report["caveats"]) == (0, [])
    assert "optimizer.bin: the optimizer state is stored by parameter index" in text
    assert "To keep it: sw.restore(sw.TrainState(model=model, optimizer=optimizer)" in text
    again = qwen()
    sw.restore(sw.TrainState(model=again), tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(StateError, match=r"converted from safetensors.*Restore the source itself"):
        sw.restore(
            sw.TrainState(model=again, optimizer=torch.optim.AdamW(again.parameters())), tmp_path / "out"
        )


def test_an_accelerator_without_fsdp(tmp_path: Path) -> None:
    """``optimizer.bin``: its model alone can be converted; its optimizer is restored by position."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    report = sw.convert(tmp_path / "state", tmp_path / "out")
    assert (report.tensors, report.optimizer_tensors) == (4, 0)
    named = {line.partition(":")[0] for line in report.skipped}
    assert named >= {"optimizer.bin", "random_states_0.pkl"}
    assert sw.verify(tmp_path / "out").ok
    again = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    taken = torch.optim.AdamW(again.parameters())
    sw.restore(sw.TrainState(model=again, optimizer=taken), tmp_path / "state")
    expected, found = states(model, optimizer.optimizer), states(again, taken)
    assert len(found) == 12
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert taken.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_stores_names_with_its_numbers(tmp_path: Path) -> None:
    """``AdamW(model.named_parameters())`` keeps ``param_names``: no position is trusted against them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    report = sw.convert(tmp_path, tmp_path / "out")
    assert report.optimizer_tensors == 12
    again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    taken = torch.optim.AdamW(again.named_parameters())
    for source in (tmp_path, tmp_path / "out"):
        sw.restore(sw.TrainState(model=again, optimizer=taken), source)
        found, expected = states(again, taken), states(model, optimizer)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    turned = torch.optim.AdamW(reversed(list(again.named_parameters())))
    with pytest.raises(StateError, match=r"names '0\.weight' where this run has 1\.bias"):
        sw.restore(sw.TrainState(model=again, optimizer=turned), tmp_path)


@pytest.mark.parametrize("kind", ["betas", "a pair"])
def test_tensors_in_tuples(tmp_path: Path, kind: str) -> None:
    """torch.optim takes tensors as betas; a pair of tensors in a state can't be put into shards."""
    model = nn.Linear(4, 4)
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    pair, betas = (torch.ones(2), torch.ones(2)), (torch.tensor(0.8), torch.tensor(0.9))
    group = {"lr": 0.1, "betas": betas if kind == "betas" else (0.8, 0.9), "params": ["weight", "bias"]}
    state = {} if kind == "betas" else {"weight": {"pair": pair}}
    torch.save({"state": state, "param_groups": [group]}, tmp_path / "optimizer.bin")
    optimizer = torch.optim.AdamW(model.parameters())
    if kind == "betas":
        sw.convert(tmp_path, tmp_path / "out")
        assert sw.verify(tmp_path / "out").ok
        for source in (tmp_path, tmp_path / "out"):
            optimizer.param_groups[0]["betas"] = (0.1, 0.2)
            sw.restore(sw.TrainState(model=model, optimizer=optimizer), source)
            found = optimizer.param_groups[0]["betas"]
            assert [type(found), *map(float, found)] == [tuple, pytest.approx(0.8), pytest.approx(0.9)]
        return
    for call in (
        lambda: sw.convert(tmp_path, tmp_path / "out"),
        lambda: sw.restore(sw.TrainState(model=model, optimizer=optimizer), tmp_path),
    ):
        with pytest.raises(ShardwiseError, match="state 'pair' of parameter 'weight' is a tuple of tensors"):
            call()
