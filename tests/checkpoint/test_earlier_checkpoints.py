"""Checkpoints that earlier shardwise wrote (tests/checkpoint/earlier) are verified, read, resumed from, and gone on from."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.format.manifest import VERSION, VERSION_OF_PLACES
from tests.checkpoint.earlier import runs
from tests.harness.command import runner
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly

EARLIER = Path(__file__).resolve().parent / "earlier"
WRITTEN = [
    (file.parent.name, kind)
    for file in sorted(EARLIER.glob("*/expected.json"))
    for kind in json.loads(file.read_text())
]

#: Differences of versions and machines. Each begins a line of the report.
OF_VERSIONS = ("python", "torch", "machine", "transformers", "numpy", "device", "threads", "shardwise")

every_checkpoint = pytest.mark.parametrize(
    ("writer", "kind"),
    [
        w
        if w in (("cc33283", "experts"), ("5b8d5e7", "dense"), ("6a88a42", "parts"))
        else pytest.param(*w, marks=pytest.mark.nightly)
        for w in WRITTEN
    ],
)


@pytest.fixture
def root(writer: str, kind: str, tmp_path: Path) -> Path:
    """The directory of the run, as it was written."""
    with tarfile.open(EARLIER / writer / f"{kind}.tar.gz") as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        tar.extractall(tmp_path / "run")
    return tmp_path / "run"


def expected_of(writer: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EARLIER / writer / "expected.json").read_text())[kind]
    return found


def _step(root: str) -> Path:
    (path,) = Path(root).glob("step-*")
    return path


def _load(root: str, kind: str) -> dict[str, str]:
    """Only the model, read from the checkpoint as from any other source."""
    run = runs.build(kind, seed=98)
    sw.load(run.state.model, _step(root))
    return runs.tensors(run.state.model)


def _resume(root: str, kind: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The report, what came back, and what comes next. Then the run goes on, and saves beside the old step."""
    run = runs.build(kind, seed=99)
    runs.scramble(55)
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(run.state)
        assert report is not None
        content, to_come = runs.content(run), runs.to_come(run)
        runs.train(run, 1)
        checkpoints.save(run.state, runs.STEPS + 1)
        saved = runs.content(run)
        again = runs.build(kind, seed=97)
        checkpoints.resume(again.state)
        assert runs.content(again) == saved
    return report.to_json(), content, to_come


def test_every_version_of_the_format_is_here() -> None:
    """docs/format.md promises to read them all."""
    found = set()
    for writer, kind in WRITTEN:
        with tarfile.open(EARLIER / writer / f"{kind}.tar.gz") as tar:
            (name,) = (name for name in tar.getnames() if name.endswith("/manifest.json"))
            file = tar.extractfile(name)
            assert file is not None
            found.add(json.loads(file.read())["version"])
    assert found == {VERSION, VERSION_OF_PLACES}


@every_checkpoint
def test_its_bytes_are_verified(root: Path, writer: str, kind: str) -> None:
    report = sw.verify(_step(str(root)))
    assert (report.ok, report.problems) == (True, ())
    for words in (
        ("verify", root),
        ("verify", _step(str(root))),
        ("inspect", root),
        ("inspect", _step(str(root))),
    ):
        result = runner().invoke(main, [*map(str, words), "--json"])
        assert result.exit_code == 0, result.output


@every_checkpoint
@pytest.mark.parametrize("world_size", [2, *nightly(3)])
def test_it_is_resumed_from(ranks: RankPool, root: Path, writer: str, kind: str, world_size: int) -> None:
    expected = expected_of(writer, kind)
    stored = expected["content"]
    if kind != "two":  # a source holds one model
        tensors = {
            k: v for k, v in stored["tensors"].items() if k.startswith("model ") and "gradient" not in k
        }
        assert ranks.run_ranks(world_size, _load, str(root), kind) == [tensors] * world_size

    resumed = ranks.run_ranks(world_size, _resume, str(root), kind)
    for rank, (report, content, to_come) in enumerate(resumed):
        assert content == stored
        assert to_come["samples"] == expected["to come"][0]["samples"]
        told = expected[f"{world_size} ranks"]
        assert {name: report[name] for name in told} == told
        others = [d for d in report["differences"] if d.partition(":")[0] not in OF_VERSIONS]
        if world_size == 2:
            assert (others, report["caveats"], report["skipped"]) == ([], (), ())
            assert report["exact"] == (not report["differences"])
            assert to_come["draws"] == expected["to come"][rank]["draws"]
        else:
            assert others == ["world size: 2 when saved, 3 now"]
    assert sw.verify(root / f"step-{runs.STEPS + 1:08d}").ok
