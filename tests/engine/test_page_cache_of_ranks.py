"""What is left in the page cache of files that two ranks read together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import _page_cache_of_ranks_fns as fns
from tests.harness.page_cache import drops_pages
from tests.harness.pool import RankPool

MIB = 1024**2


@pytest.mark.slow
def test_pages_are_given_back(ranks: RankPool, tmp_path: Path) -> None:
    """Of 96 MiB at most 4 stay with "release"; with "keep", and on a CPU by itself, all."""
    if not drops_pages(tmp_path):
        pytest.skip("files in the temporary directory can't leave the page cache")
    source, scratch = tmp_path / "model", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    nbytes = fns.write_model(str(source))
    assert nbytes > 96 * MIB
    for found in ranks.run_ranks(2, fns.loads, str(source), str(scratch)):
        for cut in ("rows", "columns"):
            assert found[f"{cut}, auto"][0] == found[f"{cut}, keep"][0] == "keep"
            assert found[f"{cut}, release"][0] == "release"
            assert found[f"{cut}, auto"][1] >= 90 * MIB
            assert found[f"{cut}, keep"][1] >= 90 * MIB
            assert found[f"{cut}, release"][1] <= 4 * MIB, (cut, found)
        for what in ("restore", "convert", "export"):
            assert found[f"{what}, keep"] >= 90 * MIB, (what, found)
            assert found[f"{what}, release"] <= 4 * MIB, (what, found)


@pytest.mark.nightly
def test_ranks_fetch_the_model_once(ranks: RankPool, tmp_path: Path) -> None:
    """Of files that are not cached, two ranks together fetch no more than there is, whoever asks for it.

    The least of three loads: the system's counter also has pages of the processes' own code that the system had dropped.
    """
    if not drops_pages(tmp_path):
        pytest.skip("files in the temporary directory can't leave the page cache")
    nbytes = fns.write_model(str(tmp_path))
    found = ranks.run_ranks(2, fns.cold_reads, str(tmp_path))
    for reads in ("plain", "auto", "ahead"):
        fetched = min(
            sum(nbytes for nbytes, _ in load) for load in zip(*(rank[reads] for rank in found), strict=True)
        )
        assert 0.98 * nbytes <= fetched <= 1.02 * nbytes, (reads, found)
    for rank in found:
        assert {words for _, words in rank["plain"]} == {"plain: asked for"}
        assert {words for _, words in rank["ahead"]} == {"ahead: asked for"}
        assert all("some bytes weren't in the page cache" in words for _, words in rank["auto"])
