"""examples/titan_loop.py and examples/fabric_loop.py: run as they are, on meshes that change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples import _loops_fns as fns
from tests.harness.pool import RankPool


def test_own_model_with_hub_weights(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run_ranks(4, fns.titan_model, str(tmp_path)):
        assert found["tensors"] == len(found["names"]) == 21
        assert "layers.1.attention.wk.weight" in found["names"]


@pytest.mark.parametrize("flags", [(), ("--from-scratch",)], ids=["loaded", "from scratch"])
@pytest.mark.slow
def test_titan_loop_goes_on_at_another_mesh(ranks: RankPool, tmp_path: Path, flags: tuple[str, ...]) -> None:
    """dp 2 × tp 2 is stopped at step 3 and goes on as dp 2 × tp 1; losses and norms are those of no stop."""
    base = str(tmp_path / "stopped/base")
    stopped = ("--out", str(tmp_path / "stopped"), *flags)
    whole = ("--out", str(tmp_path / "whole"), "--base", base, *flags, "--tp", "2", "--steps", "6")
    again = ("--out", str(tmp_path / "again"), "--base", base, *flags, "--tp", "2", "--steps")
    four = ranks.run_ranks(
        4, fns.titan, (*stopped, "--tp", "2", "--steps", "3"), whole, (*again, "3"), (*again, "6")
    )
    found, expected, *same_mesh = four[0]
    found |= ranks.run_ranks(2, fns.titan, (*stopped, "--steps", "6"))[0][0]
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, numbers in found.items():
        assert numbers == pytest.approx(expected[step], rel=1e-5), step
    assert same_mesh[0] | same_mesh[1] == expected, "bitwise on the same mesh"
    assert found[6][0] < found[1][0] - 0.05, "it learns"
    kept = {p.name for p in (tmp_path / "stopped/checkpoints").iterdir() if p.name.startswith("step-")}
    assert kept == {"step-00000004", "step-00000006"}
    exported = tmp_path / "stopped/export-6"
    if flags:
        assert "layers.0.attention.wq.weight" in stored_names(exported)
    else:
        assert stored_names(exported) == stored_names(Path(base))
        assert fns.trained_loss(str(exported)) < fns.trained_loss(base) - 0.05


@pytest.mark.nightly
def test_fabric_takes_a_model_that_is_sharded_and_filled(ranks: RankPool, tmp_path: Path) -> None:
    """By its ModelParallelStrategy. Stopped on 2 ranks, the run goes on there bitwise, and alike on 3 ranks."""
    out = {name: ("--out", str(tmp_path / name), "--steps") for name in ("here", "there", "whole")}
    runs = ((*out["here"], "3"), (*out["there"], "3"), (*out["here"], "6"), (*out["whole"], "6"))
    first, also_first, here, whole = ranks.run_ranks(2, fns.fabric, *runs)[0]
    (there,) = ranks.run_ranks(3, fns.fabric, (*out["there"], "6"))[0]
    assert first | here == whole, "bitwise on as many ranks"
    assert list(also_first | there) == [1, 2, 3, 4, 5, 6]
    assert also_first | there == pytest.approx(whole, rel=1e-5)
    assert whole[6] < whole[1] - 0.1, "it learns"
    hub = stored_names(tmp_path / "whole/base")
    assert set(fns.stored_tensors(str(tmp_path / "whole/checkpoints/step-00000006"))) == hub
    assert stored_names(tmp_path / "there/export-6") == hub


def stored_names(directory: Path) -> set[str]:
    """Of the tensors in a hub directory, from its files' headers."""
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            names |= json.loads(file.read(int.from_bytes(file.read(8), "little"))).keys() - {"__metadata__"}
    return names
