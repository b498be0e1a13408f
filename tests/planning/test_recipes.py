"""Recipes are those of the model's class whatever was done to the model, and what it saves later has the hub's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from shardwise.loading.pretrained import build_meta
from shardwise.names import named_tensors
from tests.harness import models
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.loading._load_fns import bits, ordinary_model, whole
from tests.planning import _recipes_fns as fns
from tests.planning._prefixes_fns import write_source

#: How many tensors have another name, and how many are made of several, in what is stored.
KINDS = {
    "qwen3": {"renamed": 0, "converted": 0, "used": 0},
    "mixtral": {"renamed": 6, "converted": 4, "used": 3},
    "qwen3-moe": {"renamed": 4, "converted": 4, "used": 2},
    "llava": {"renamed": 64, "converted": 0, "used": 5},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    for kind in KINDS:
        models.write_hub_directory(kind, root / kind, torch.float32)
    return {kind: root / kind for kind in KINDS}


@pytest.mark.parametrize("kind", nightly_but(KINDS, "mixtral", "llava"))
def test_rules_of_a_wrapped_model(ranks: RankPool, directories: dict[str, Path], kind: str) -> None:
    assert ranks.run_ranks(2, fns.rules_of_wrapped, str(directories[kind])) == [KINDS[kind]] * 2


@pytest.mark.parametrize("name", [n for n in fns.WRAPPED if "adapters" not in n])
@on_ranks(2)
def test_a_wrapped_model_is_loaded(directories: dict[str, Path], name: str) -> None:
    """sw.load on a wrapped model gives the values of the ordinary one."""
    directory = str(directories["qwen3-moe"])
    model = fns.WRAPPED[name](build_meta(directory))
    sw.load(model, directory)
    expected = ordinary_model(directory).state_dict(keep_vars=True)
    found = {n: t.tensor for t in named_tensors(model) if t.persistent for n in t.names}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(bits(whole(found[key])), bits(tensor)), key


def test_a_class_whose_rules_can_not_be_found_out(
    ranks: RankPool, directories: dict[str, Path], tmp_path: Path
) -> None:
    found, same = ranks.run_ranks(2, fns.without_rules, str(directories["qwen3"]), str(tmp_path / "out"))
    assert found == same
    for error in found.values():
        assert error.startswith("UnsupportedConversionError: "), error
        assert "Narrow(config) fails (TypeError: " in error
        assert "missing 1 required positional argument: 'layers'" in error
    assert "give names=" in found["load"]
    assert not (tmp_path / "out").exists()


#: What is stored under other names than the module's, in other layouts, and by other versions of transformers.
#: How many conversions are inverted.
SAVED = {
    "mixtral": 3,
    "llava": 5,
    "llava-new": 0,
    "gemma3-doubled": 5,
    "moe-base": 2,
    "qwen2-vl": 2,
    "bert-legacy": 2,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, directories: dict[str, Path]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    found = {kind: root / kind for kind in SAVED}
    for kind, directory in found.items():
        if kind == "mixtral":
            models.write_hub_directory(kind, directory, torch.float32)
        else:
            write_source(kind, directory)
    return found


def assert_same_files(saved: Path, directory: Path, ties: Mapping[str, str] | None = None) -> None:
    """The same names and bits as in the directory that was loaded."""
    found, expected = (load_file(d / "model.safetensors") for d in (saved, directory))
    expected |= {alias: expected[name] for alias, name in (ties or {}).items()}
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())[:6]
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(fns.bits(found[name]), fns.bits(tensor)), name


@pytest.mark.parametrize("kind", SAVED)
def test_save_pretrained_gives_the_hub_s_names_back(
    ranks: RankPool, sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    ranks.run_ranks(1, fns.saved_alone, str(sources[kind]), str(tmp_path))
    for name in ("loaded", "filled"):
        assert_same_files(tmp_path / name, sources[kind])


@pytest.mark.parametrize("how", nightly_but(fns.LOADED, "load"))
@pytest.mark.parametrize("kind", nightly_but(SAVED, "mixtral", "gemma3-doubled", "bert-legacy"))
def test_a_gathered_model_is_saved_with_the_hub_s_names(
    ranks: RankPool, sources: dict[str, Path], tmp_path: Path, kind: str, how: str
) -> None:
    used = ranks.run_ranks(2, fns.saved_gathered, str(sources[kind]), str(tmp_path / "out"), how)
    assert used == [SAVED[kind]] * 2
    # Gathered, tied tensors do not share memory: transformers can't see that they are one, and stores both.
    ties = {"lm_head.weight": "language_model.model.model.embed_tokens.weight"} if "gemma3" in kind else {}
    assert_same_files(tmp_path / "out", sources[kind], ties)


@pytest.mark.parametrize("kind", nightly_but(SAVED, "mixtral", "gemma3-doubled", "bert-legacy"))
def test_exports_have_the_same_names(
    ranks: RankPool, sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    ranks.run_ranks(2, fns.exported, str(sources[kind]), str(tmp_path))
    for name in ("live", "stored"):
        assert_same_files(tmp_path / name, sources[kind])
