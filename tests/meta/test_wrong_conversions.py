"""The comparisons that the suite and the sweep stand on notice a conversion that is wrong.

A load can't notice it: a wrong conversion covers every element once, as a right one does. So what is loaded is
compared with the ordinary load, bit by bit; here the conversions are spoiled on purpose, and it must show.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.architectures import architectures, write_checkpoint
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly, nightly_but
from tests.meta import _wrong_conversions_fns as fns

MODEL_TYPES = sorted({model_type for model_type, _ in fns.ERRORS})


@pytest.fixture(scope="module", params=nightly_but(MODEL_TYPES, "molmo2_text"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny checkpoint as the library saves it: experts stored one by one, fused weights stored whole."""
    directory = tmp_path_factory.mktemp(request.param)
    (architecture,) = architectures(request.param)
    write_checkpoint(architecture, directory, torch.float32)
    return request.param, str(directory)


@pytest.mark.parametrize("world_size", [3, *nightly(2)])
@pytest.mark.slow
def test_a_wrong_conversion_shows(
    ranks: RankPool, checkpoint: tuple[str, str], tmp_path: Path, world_size: int
) -> None:
    model_type, directory = checkpoint
    for found in ranks.run_ranks(world_size, fns.wrong_loads, model_type, directory, str(tmp_path)):
        assert found.pop("") == {"tests": "", "sweep": [], "export": []}
        assert len(found) == sum(m == model_type for m, _ in fns.ERRORS)
        for error, said in found.items():
            names = fns.ERRORS[model_type, error][2]
            assert said["tests"].endswith(names), (error, said)
            (problem,) = said["sweep"]
            assert problem.startswith(f"values of {said['wrong']}: "), (error, said)
            assert all(name.endswith(names) for name in problem.partition(": ")[2].split("; ")), (error, said)
            # An export goes the way back that the load came: the error cancels, and only the load shows it.
            assert said["export"] == [], (error, said)


@pytest.mark.nightly
def test_a_wrong_export_shows(ranks: RankPool, checkpoint: tuple[str, str], tmp_path: Path) -> None:
    """Of a checkpoint, whose conversions are run again; of a live model, whose record says how it was loaded."""
    model_type, directory = checkpoint
    for found in ranks.run_ranks(2, fns.wrong_exports, model_type, directory, str(tmp_path)):
        assert found.pop("live") == []
        assert found.pop("stored") == []
        assert len(found) == 1 + sum(m == model_type for m, _ in fns.ERRORS)
        for error, problems in found.items():
            assert any(p.startswith("values of ") for p in problems), (error, problems)
            assert any(p.startswith("another model after an ordinary load") for p in problems), (
                error,
                problems,
            )
