"""Models that bring their classes along as Python files: run only if trusted, then like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.cli import main
from tests.harness.command import runner
from tests.harness.launch import Launch
from tests.harness.models import write_state
from tests.harness.pool import RankPool
from tests.harness.remote_model import CODE, build_class, write_code, write_remote
from tests.harness.tiers import nightly
from tests.models import _remote_code_fns as fns


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp("remote") / kind for kind in CODE}
    for kind, directory in found.items():
        write_remote(kind, directory)
    return found


@pytest.mark.parametrize("world_size", [2, *nightly(1, 3)])
@pytest.mark.parametrize("kind", CODE)
def test_equals_the_ordinary_load(
    ranks: RankPool, directories: dict[str, Path], kind: str, world_size: int
) -> None:
    conversions = ranks.run_ranks(world_size, fns.equals_the_ordinary_load, str(directories[kind]))
    assert set(conversions) == ({0} if kind == "quirky" else {2})


@pytest.mark.parametrize("kind", CODE)
def test_saves_resumes_and_exports_with_its_code(
    ranks: RankPool, directories: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    for live, stored in ranks.run_ranks(2, fns.saves_resumes_exports, str(directories[kind]), str(tmp_path)):
        assert live == stored == sorted([*CODE[kind][0], "config.json", "model.safetensors"])
    for name in ("live", "stored"):
        for file in CODE[kind][0]:
            assert (tmp_path / name / file).read_bytes() == (directories[kind] / file).read_bytes()
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["auto_map"] == CODE[kind][1]["auto_map"]
        assert config["architectures"] == CODE[kind][1]["architectures"]


@pytest.mark.parametrize("kind", CODE)
def test_without_the_flag_nothing_runs_and_nothing_prompts(
    ranks: RankPool, directories: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    directory = tmp_path / "model"
    write_code(kind, directory, prologue=f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    shutil.copy(directories[kind] / "model.safetensors", directory)
    first, *same = ranks.run_ranks(2, fns.untrusted, str(directory))
    assert same == [first]
    by_config, by_auto_class, meta = first
    reference = CODE[kind][1]["auto_map"]["AutoConfig" if kind == "quirky" else "AutoModelForCausalLM"]
    for error in (by_config, meta):
        assert error.startswith("SourceError"), error
        assert str(directory) in error
        assert reference in error
        assert "pass trust_remote_code=True" in error
    # transformers has a class for the second config, which from_pretrained takes without the flag.
    assert by_auto_class == by_config if kind == "quirky" else by_auto_class.startswith("PlanError")
    assert not (tmp_path / "ran").exists()
    build_class(directory)  # by transformers, which was told to
    assert (tmp_path / "ran").exists()


def test_own_code_goes_before_the_library_s_where_it_is_trusted(
    ranks: RankPool, directories: dict[str, Path]
) -> None:
    classes = ranks.run_ranks(2, fns.classes_of_auto_classes, str(directories["own_moe"]))
    assert classes == [{"trusted": "OwnMoeForCausalLM", "not trusted": "Qwen3MoeForCausalLM"}] * 2


def test_what_is_not_stored_gets_the_class_s_own_values(
    ranks: RankPool, directories: dict[str, Path], tmp_path: Path
) -> None:
    lost = {"core.blocks.1.up.weight", "core.blocks.1.up.bias", "core.embed.weight"}
    shutil.copytree(directories["quirky"], tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    write_state({n: t for n, t in stored.items() if n not in lost}, tmp_path / "model")
    (alone,) = ranks.run_ranks(1, fns.values_of_missing, str(tmp_path / "model"))
    assert set(alone) == lost
    assert set(alone["core.blocks.1.up.bias"].tolist()) == {0.25}
    assert 0.9 < alone["core.embed.weight"].abs().max() < 1.0
    assert 0.25 < alone["core.blocks.1.up.weight"].std() < 0.35
    for found in ranks.run_ranks(2, fns.values_of_missing, str(tmp_path / "model")):
        assert all(torch.equal(found[name], alone[name]) for name in lost)


def test_code_that_can_not_be_imported(ranks: RankPool, tmp_path: Path) -> None:
    for name, prologue in (("sound", ""), ("broken", "import no_such_package\n")):
        write_code("quirky", tmp_path / name, prologue)
    everywhere = ranks.run_ranks(3, fns.load_own, [str(tmp_path / "broken")] * 3)
    assert len(set(everywhere)) == 1
    assert "no_such_package" in everywhere[0]
    mixed = [str(tmp_path / name) for name in ("sound", "sound", "broken")]
    (error,) = set(ranks.run_ranks(3, fns.load_own, mixed))
    assert error.startswith("RankError: 'import the model's code' failed\n  rank 2: "), error
    assert "no_such_package" in error
    assert "rank 1" not in error


@pytest.mark.slow
def test_ranks_that_share_a_cache_import_one_after_another(tmp_path: Path) -> None:
    """transformers copies code in place: a rank must not read a file that another is just writing."""
    log = tmp_path / "log"
    note = "with open({!r}, 'a') as file:\n    file.write('{} ' + os.environ['RANK'] + chr(10))\n"
    begin, end = note.format(str(log), "begin"), note.format(str(log), "end")
    write_remote("own_moe", tmp_path / "model")
    file = tmp_path / "model" / "modeling_own_moe.py"
    file.write_text(f"import os, time\n{begin}time.sleep(0.5)\n{file.read_text()}\n{end}")
    caches = [str(tmp_path / name) for name in ("a", "a", "b", "b")]
    with Launch(4, fns.load_with_caches, str(tmp_path / "model"), caches, fresh=True) as job:
        assert job.wait(170) == [0] * 4
        files = [job.result(rank) for rank in range(4)]
    assert [f.startswith(cache) for f, cache in zip(files, caches, strict=True)] == [True] * 4
    lines = log.read_text().splitlines()
    assert lines[:4] == ["begin 0", "end 0", "begin 2", "end 2"]
    assert sorted(lines[4:]) == ["begin 1", "begin 3", "end 1", "end 3"]


def test_plan_and_export_on_the_command_line(directories: dict[str, Path], tmp_path: Path) -> None:
    path = str(directories["quirky"])
    refused = runner().invoke(main, ["plan", path, "--ranks", "2"])
    assert refused.exit_code == 1
    assert "--trust-remote-code" in refused.stderr
    planned = runner().invoke(main, ["plan", path, "--ranks", "2", "--trust-remote-code", "--json"])
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["model_class"] == "QuirkyForCausalLM"
    export = ["export", path, str(tmp_path / "out"), "--trust-remote-code"]
    assert runner().invoke(main, export).exit_code == 0
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == sorted(
        f.name for f in directories["quirky"].iterdir()
    )
