"""Files of ``torch.save`` of each rank (verl, SkyRL): put together, restored on any number of ranks, and refused where they don't fit together."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.runs.third_party import find_run
from tests.catalog import _dcp_fns
from tests.harness.command import runner
from tests.harness.pool import RankPool
from tests.runs import _third_party_fns as fns
from tests.runs.test_numbered import qwen

Saved = dict[str, tuple[Path, dict[str, torch.Tensor], list[list[float]]]]
KINDS = {"fsdp2": (2,), "hsdp": (2, 2), "fsdp1": (2,), "fsdp1 with a mesh": (2,)}


@pytest.fixture(scope="module", name="saved")
def _saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of each kind: the folder after three steps, the whole state, and each rank's losses in the next five steps."""
    found: Saved = {}
    for kind, sizes in KINDS.items():
        folder = tmp_path_factory.mktemp("run") / "global_step_3" / "actor"
        how = "fsdp2" if kind == "hsdp" else kind
        of_ranks = ranks.run_ranks(len(sizes) * 2, fns.ranks_save, str(folder), how, sizes)
        found[kind] = folder, of_ranks[0][0], [losses for _, losses in of_ranks]
    return found


@pytest.mark.parametrize("now", [1, 2, 3])
def test_a_run_is_restored_at_any_number_of_ranks(ranks: RankPool, saved: Saved, now: int) -> None:
    """Weights and moments bitwise, and at the same number of ranks the next steps."""
    kinds = ("fsdp2", "hsdp")
    found = ranks.run_ranks(now, fns.each_takes_over, [str(saved[kind][0]) for kind in kinds])
    for rank, reports in enumerate(found):
        for report, kind in zip(reports, kinds, strict=True):
            assert (report["step"], report["documents"], report["exact"]) == (3, ("scheduler",), False)
            assert report["tensors"] == (14, 14 * 3)
            assert report["state"].keys() == saved[kind][1].keys()
            assert all(torch.equal(value, saved[kind][1][name]) for name, value in report["state"].items())
            if (kind, now) == ("fsdp2", 2):
                assert report["losses"] == saved[kind][2][rank]
    assert sum(reports[0]["read"] for reports in found) <= 1.05 * fns.state_bytes()


def test_models_of_fsdp1_and_fsdp2(ranks: RankPool, saved: Saved) -> None:
    for found in ranks.run_ranks(2, fns.each_loads, [str(folder) for folder, _, _ in saved.values()]):
        for (_, expected, _), model in zip(saved.values(), found, strict=True):
            assert model.keys() == {name for name in expected if "exp_avg" not in name}
            assert all(torch.equal(model[name], expected[name]) for name in model)


@pytest.mark.parametrize("now", [2, 3])
def test_accelerate_without_dcp(ranks: RankPool, tmp_path: Path, now: int) -> None:
    expected = ranks.run_ranks(
        2, _dcp_fns.accelerate_trains, str(tmp_path / "state"), "SHARDED_STATE_DICT", 3, 6, False
    )
    assert (tmp_path / "state/pytorch_model_fsdp_0_rank1.bin").is_file()
    found = ranks.run_ranks(now, _dcp_fns.goes_on_here, str(tmp_path / "state"), 3, 6)
    for rank in found:
        assert (rank["documents"], rank["saved_world_size"]) == (("scheduler",), 2)
        assert rank["tensors"] == (14, 14 * 3)
    assert found[0]["losses"][0] == pytest.approx(expected[0][0], rel=1e-6)
    if now == 2:
        assert [rank["losses"] for rank in found] == expected
    (tmp_path / "state/optimizer_0_rank1.bin").unlink()
    with pytest.raises(ShardwiseError, match="is only partly there"):
        find_run(tmp_path / "state").optimizer(0)


def test_the_file_of_one_rank_stands_for_all(saved: Saved) -> None:
    folder = saved["fsdp2"][0]
    assert open_catalog(folder / "model_world_size_2_rank_1.pt").tensors == open_catalog(folder).tensors


def _without(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, other: (folder / name).unlink()


def _cut(folder: Path, other: Path) -> None:
    file = folder / "model_world_size_2_rank_1.pt"
    file.write_bytes(file.read_bytes()[:-700])


def _of_other_run(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, other: shutil.copy(other / name, folder / name) and None


def _of_fewer_ranks(folder: Path, other: Path) -> None:
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_1_rank_0.pt")


def _twice(folder: Path, other: Path) -> None:
    shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_2_rank_1.pt")


DAMAGES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "a rank's model is missing": (
        _without("model_world_size_2_rank_1.pt"),
        r"has no file of rank\(s\) \[1\] of 2",
    ),
    "a rank's optimizer is missing": (
        _without("optim_world_size_2_rank_0.pt"),
        r"has no file of rank\(s\) \[0\] of 2",
    ),
    "cut short": (_cut, "rank_1.pt: not a torch.save file"),
    "of two numbers of ranks": (_of_fewer_ranks, "has files of runs on 1 and 2 ranks"),
    "one rank's file under another's name": (
        _twice,
        "is only partly there: the files of all ranks hold 5 of 10 elements",
    ),
    "an optimizer of another step": (
        _of_other_run("optim_world_size_2_rank_1.pt"),
        r"'state\.0\.step' isn't the same in optim_world_size_2_rank_0.pt and optim_world_size_2_rank_1.pt",
    ),
    "a scheduler of another step": (
        _of_other_run("extra_state_world_size_2_rank_1.pt"),
        r"isn't the same in extra_state_world_size_2_rank_0.pt",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_together_is_named_before_anything_is_placed(
    ranks: RankPool, saved: Saved, tmp_path: Path, damage: str
) -> None:
    other = tmp_path / "other"
    if "another step" in damage:
        ranks.run_ranks(2, fns.ranks_save, str(other), "fsdp2", (2,), 4)
    folder = Path(shutil.copytree(saved["fsdp2"][0], tmp_path / "actor"))
    change, expected = DAMAGES[damage]
    change(folder, other)
    for error in ranks.run_ranks(2, fns.errors_of, [str(folder)]):
        assert re.search(expected, error[0]), error


def test_replicas_that_differ(saved: Saved, tmp_path: Path) -> None:
    """Each tensor in turn: those with a storage of their own are compared by checksums, views of padded ones by their content."""
    folder = Path(shutil.copytree(saved["hsdp"][0], tmp_path / "actor"))
    file = folder / "model_world_size_4_rank_3.pt"
    whole = file.read_bytes()
    names = [n for n, t in torch.load(file, weights_only=False).items() if t.to_local().numel()]
    padded = 0
    for name in names:
        content = torch.load(io.BytesIO(whole), weights_only=False)
        local = content[name].to_local()
        padded += local.untyped_storage().nbytes() > local.nbytes
        local.mul_(2).add_(1)
        torch.save(content, file)
        with pytest.raises(ShardwiseError, match=rf"'{name}' isn't the same in .*rank_\d.pt and .*rank_3.pt"):
            open_catalog(folder)
    assert 0 < padded < len(names)


def test_an_optimizer_of_flat_parameters_is_named(ranks: RankPool, saved: Saved) -> None:
    for (error,) in ranks.run_ranks(2, fns.errors_of, [str(saved["fsdp1"][0])]):
        assert "each rank saved its part of FSDP1's flat parameters" in error


def test_convert_finds_the_config_that_verl_saves(saved: Saved, tmp_path: Path, ranks: RankPool) -> None:
    """And with it the names of the parameters that the optimizer only numbers."""
    folder = tmp_path / "global_step_5" / "actor"
    qwen().save_pretrained(folder / "huggingface")
    ranks.run_ranks(2, fns.qwen_saves, str(folder))
    out = tmp_path / "step-00000005"
    done = runner().invoke(main, ["convert", str(folder), str(out), "--to", "checkpoint"])
    assert done.exit_code == 0, done.output
    assert runner().invoke(main, ["verify", str(out)]).exit_code == 0
    model = sw.load_pretrained(str(folder / "huggingface"))
    optimizer = torch.optim.AdamW(model.parameters())
    report = sw.restore(sw.TrainState(model=model, optimizer=optimizer), str(out))
    expected = ranks.run_ranks(2, fns.qwen_restores, str(folder))[0]
    assert report.step == 5
    assert expected.keys() == {n for n, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name][0]), name
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], expected[name][1]), name
