"""Planning is local: no rank opens another's header for it, none sends its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.format.manifest import read_manifest
from tests.harness.pool import RankPool
from tests.planning import _local_planning_fns as fns


@pytest.fixture(scope="module", params=["1d", "hsdp", "tp"])
def checkpoint(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    path = tmp_path_factory.mktemp("planning") / "checkpoint"
    ranks.run_ranks(4, fns.save, str(path), request.param)
    return path


def test_a_plan_opens_the_manifest_alone(ranks: RankPool, checkpoint: Path) -> None:
    for found in ranks.run_ranks(3, fns.plan_only, str(checkpoint)):
        assert found["opened"] == ["manifest.json"]
        assert found["from"] >= 2, "this rank's shards lie in files of several"
        assert found["chunks"] > 0


def test_a_resume_reads_payload_alone_and_sends_sums_alone(ranks: RankPool, checkpoint: Path) -> None:
    files = read_manifest(checkpoint).files
    for found in ranks.run_ranks(3, fns.resume, str(checkpoint)):
        slices = {name for name, _, _ in found["reads"]}
        assert slices
        for name, offset, nbytes in found["reads"]:
            assert files[name].header_bytes <= offset <= offset + nbytes <= files[name].nbytes, (name, offset)
        assert set(found["opened"]) == slices | {"manifest.json", "state.json"}
        for label, nbytes in found["sent"]:
            # 16 bytes for the optimizer's packed 0-d states, of which every rank has a replica.
            most = 8 * found["tensors"] + 16 if label == "digest" else 300
            assert nbytes <= most, (label, nbytes)
