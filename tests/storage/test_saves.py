"""Saves into a store: all of it or nothing, whatever request fails, whoever else writes there, whenever the process is killed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, LockedError, ShardwiseError
from shardwise.format.manifest import read_manifest
from shardwise.publish.places import ObjectTarget
from shardwise.publish.write import ObjectWriter, delete_below
from shardwise.ranks.ranks import Ranks
from shardwise.storage import exists, files_below, is_file, read_range, read_whole
from tests.harness import models
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, S3Server, use_store
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.storage._states import trained

ROOT = f"s3://{BUCKET}/saves"


def use(endpoint: str) -> None:
    use_store(endpoint, retry_config={"max_retries": 2})


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port) as found:
        use(found.endpoint)
        yield found


def small_state(seed: int = 0) -> sw.TrainState:
    """A model and AdamW after a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return sw.TrainState(model=model, optimizer=optimizer)


def test_the_store_gets_a_checksum_of_every_body(proxy: Proxy) -> None:
    """Signed with the request: the store refuses other bytes (shown with Ceph in test_servers.py; moto compares nothing)."""
    seen: list[tuple[str, bool, int]] = []

    def decide(asked: Asked) -> Do:
        def sent(body: bytes, headers: Mapping[str, str]) -> bytes:
            if body:
                told = headers["x-amz-content-sha256"]
                seen.append((asked.path, told == hashlib.sha256(body).hexdigest(), len(body)))
            return body

        return Do(sent=sent)

    proxy.reset(decide)
    torch.manual_seed(0)
    sw.save(sw.TrainState(model=nn.Linear(3000, 1000)), f"{ROOT}/summed")
    assert [path for path, is_told, _ in seen if not is_told] == []
    assert sum("partNumber" in path for path, _, _ in seen) == 2
    assert any("manifest.json" in path for path, _, _ in seen)
    assert sum(nbytes for _, _, nbytes in seen) > 3000 * 1000 * 4


def digest_of(url: str) -> str:
    """Of a checkpoint that is proved first."""
    report = sw.verify(url)
    assert report.ok, report.problems
    return sw.restore(small_state(9), url).digest


# ----------------------------------------------------------------------------------------------------
# On ranks


def save_both(hub: str, endpoint: str, url: str, path: str) -> int:
    use(endpoint)
    state = trained(hub, 1)
    report = sw.save(state, url, step=4)
    assert report.path == url.rstrip("/")
    assert report.bytes_written == sw.save(state, path, step=4).bytes_written
    return report.bytes_written


def resume_both(hub: str, endpoint: str, url: str, path: str) -> tuple[str, str]:
    use(endpoint)
    return sw.restore(trained(hub, 2), url).digest, sw.restore(trained(hub, 3), path).digest


def save_one(hub: str, endpoint: str, url: str) -> str:
    use(endpoint)
    try:
        sw.save(trained(hub, 1), url, io=sw.IOOptions(timeout_s=60))
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    models.write_hub_directory("qwen3", root / "qwen3", torch.float32)
    return root


def test_ranks_save_and_other_ranks_resume(hub: Path, proxy: Proxy, ranks: RankPool, tmp_path: Path) -> None:
    """The same files as in a directory, and the same state on another number of ranks."""
    url, path = f"{ROOT}/run/step-00000004", tmp_path / "step-00000004"
    given = {"hub": str(hub), "endpoint": proxy.endpoint, "url": f"{url}/", "path": str(path)}
    assert all(ranks.run_ranks(2, save_both, **given))
    local = {p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    there = {name: stat.nbytes for name, stat in files_below(url).items() if stat}
    assert there.keys() == local.keys()
    assert {n: there[n] for n in there if n.startswith("model/")} == {
        n: local[n] for n in there if n.startswith("model/")
    }
    assert sw.verify(url).ok
    assert not exists(f"{url}.claim")
    for world_size in (1, 3):
        found = ranks.run_ranks(world_size, resume_both, **given)
        assert len({digest for pair in found for digest in pair}) == 1


@pytest.mark.parametrize(
    "failing", nightly_but(("rank/00001.json", "manifest.json", "model/"), "manifest.json")
)
def test_a_write_that_fails_on_one_rank(hub: Path, proxy: Proxy, ranks: RankPool, failing: str) -> None:
    url = f"{ROOT}/failing/{len(failing)}"
    proxy.reset(
        lambda asked: Do(status=403) if asked.method in ("PUT", "POST") and failing in asked.path else None
    )
    found = ranks.run_ranks(2, save_one, hub=str(hub), endpoint=proxy.endpoint, url=url)
    assert len(set(found)) == 1
    assert "403" in found[0]
    assert not exists(url)
    assert not exists(f"{url}.claim")


# ----------------------------------------------------------------------------------------------------
# One process


def test_what_is_there_already(proxy: Proxy) -> None:
    url = f"{ROOT}/twice"
    sw.save(small_state(), url)
    expected = digest_of(url)
    with pytest.raises(CheckpointError, match="exists already"):
        sw.save(small_state(1), url)
    assert digest_of(url) == expected


@pytest.mark.parametrize("nbytes", [10, 9 * 1024**2])  # in one request, and in parts
def test_bytes_may_be_changed_after_a_write(proxy: Proxy, nbytes: int) -> None:
    """Tensors on a device, and a conversion, come through one buffer that is used again."""
    url, buffer = f"{ROOT}/buffer-{nbytes}", bytearray(nbytes)
    with ObjectWriter(url, expected_bytes=2 * nbytes) as file:
        for letter in b"ab":
            buffer[:] = bytes([letter]) * nbytes
            file.write(buffer)
        buffer[:] = b"c" * nbytes
    assert read_range(url, 0, 2 * nbytes) == b"a" * nbytes + b"b" * nbytes


def test_another_save_has_claimed_it(proxy: Proxy, server: S3Server) -> None:
    server.put("saves/claimed.claim", b'{"nonce": "1", "began": "2026-01-02 03:04:05 UTC"}')
    with pytest.raises(LockedError, match="since 2026-01-02 03:04:05 UTC") as caught:
        sw.save(small_state(), f"{ROOT}/claimed")
    assert f"delete {ROOT}/claimed.claim" in str(caught.value)
    assert not exists(f"{ROOT}/claimed")


def test_a_store_without_conditional_writes(proxy: Proxy) -> None:
    proxy.reset(lambda asked: Do(without=("if-none-match",)))
    with pytest.raises(CheckpointError, match=r"support conditional writes.*shardwise copy"):
        sw.save(small_state(), f"{ROOT}/plain")
    assert not exists(f"{ROOT}/plain")
    assert not is_file(f"{ROOT}/plain.claim")


def test_what_another_program_puts_there_is_found(proxy: Proxy, server: S3Server) -> None:
    """Before the manifest: nothing is published, and what is not ours stays out of it."""

    def strange(asked: Asked) -> Do | None:
        if asked.method == "PUT" and asked.path.endswith("state.json"):
            return Do(before=lambda: server.put("saves/strange/model/other", b"1"))
        return None

    proxy.reset(strange)
    with pytest.raises(CheckpointError, match="model/other: not ours"):
        sw.save(small_state(), f"{ROOT}/strange")
    assert not is_file(f"{ROOT}/strange/manifest.json")


def requests_of_a_save(proxy: Proxy) -> int:
    proxy.reset()
    sw.save(small_state(), f"{ROOT}/counted-{os.urandom(4).hex()}")
    return len(proxy.log)


FAULTS: dict[str, Callable[[], Do]] = {
    "busy": lambda: Do(status=503),
    "refused": lambda: Do(status=403),
    "lost reply": lambda: Do(lose_reply=True),
    "cut": lambda: Do(cut_after=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_one_fault_at_every_request(proxy: Proxy, kind: str) -> None:
    """Either the save succeeds and the checkpoint is whole, or it raises and nothing is there."""
    numbers = range(requests_of_a_save(proxy))
    expected = digest_of_save(proxy)
    outcomes: Counter[str] = Counter()
    for number in numbers:
        url = f"{ROOT}/faults/{kind.replace(' ', '-')}-{number}"
        proxy.reset(lambda asked, n=number: FAULTS[kind]() if asked.number == n else None)  # type: ignore[misc]
        try:
            sw.save(small_state(), url)
        except ShardwiseError:
            outcomes["raised"] += 1
            proxy.reset()
            assert not is_file(f"{url}/manifest.json"), number
        else:
            outcomes["saved"] += 1
            proxy.reset()
            assert digest_of(url) == expected, number
    # But for looks and for what only tidies up, a request that is refused is an error; what passes is none. A reply that is cut
    # may be either: obstore does not ask again for a write that was carried out.
    least = {"busy": ("saved", 0), "lost reply": ("saved", 2), "refused": ("raised", 3)}
    outcome, others = least.get(kind, ("saved", len(numbers)))
    assert outcomes[outcome] >= len(numbers) - others, outcomes


def digest_of_save(proxy: Proxy) -> str:
    proxy.reset()
    sw.save(small_state(), f"{ROOT}/expected-{(name := os.urandom(4).hex())}")
    return digest_of(f"{ROOT}/expected-{name}")


@pytest.mark.nightly
def test_races_of_two_savers(proxy: Proxy) -> None:
    """One wins; the other gets an error; what is there is the winner's, whole."""
    expected = {}
    for seed in (1, 2):
        sw.save(small_state(seed), f"{ROOT}/racer-{seed}")
        expected[seed] = digest_of(f"{ROOT}/racer-{seed}")
    for turn in range(10):
        url, start, results = f"{ROOT}/race-{turn}", threading.Barrier(2), dict[int, Any]()

        def run(
            seed: int, url: str, start: threading.Barrier, results: dict[int, Any], state: sw.TrainState
        ) -> None:
            start.wait()
            try:
                results[seed] = sw.save(state, url)
            except CheckpointError as error:
                results[seed] = error

        threads = [
            threading.Thread(target=run, args=(seed, url, start, results, small_state(seed)))
            for seed in (1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [seed for seed, result in results.items() if isinstance(result, sw.reports.SaveReport)]
        assert len(won) == 1, results
        assert digest_of(url) == expected[won[0]]


def _child(endpoint: str, url: str) -> None:
    use(endpoint)
    sw.save(small_state(), url)


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 5, 8, 11])
def test_killed_at_a_request(proxy: Proxy, at: int) -> None:
    """Nothing is published, and the next save to that place says what to do."""
    url = f"{ROOT}/killed-{at}"
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_child, args=(proxy.endpoint, url))
    proxy.reset(
        lambda asked: (
            Do(before=lambda: os.kill(child.pid or 0, signal.SIGKILL)) if asked.number == at else None
        )
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    proxy.reset()
    assert not is_file(f"{url}/manifest.json")
    with pytest.raises(CheckpointError):
        sw.save(small_state(), url)
    sw.save(small_state(), f"{url}-again")
    assert sw.verify(f"{url}-again").ok


# ----------------------------------------------------------------------------------------------------
# What is published stays


def test_a_save_that_begins_while_another_one_publishes(proxy: Proxy) -> None:
    """It looks at the place once it has the claim: not at what was there before the other one published."""
    url = f"{ROOT}/late-claim"

    def publish() -> None:
        proxy.reset()
        sw.save(small_state(1), url)

    def decide(asked: Asked) -> Do | None:
        return Do(before=publish) if asked.method == "PUT" and asked.path.endswith(".claim") else None

    proxy.reset(decide)
    with pytest.raises(CheckpointError, match="exists already"):
        sw.save(small_state(2), url)
    assert digest_of(url)
    assert sw.restore(small_state(9), url).digest == digest_of_seed(1)
    assert not is_file(f"{url}.claim")


def digest_of_seed(seed: int) -> str:
    url = f"{ROOT}/of-seed-{seed}-{os.urandom(4).hex()}"
    sw.save(small_state(seed), url)
    return sw.restore(small_state(9), url).digest


def test_a_published_checkpoint_that_no_listing_shows(proxy: Proxy) -> None:
    """A late listing: its manifest is asked for by name, and nothing of it is written over or deleted."""
    url = f"{ROOT}/late"
    sw.save(small_state(1), url)
    proxy.reset(lambda asked: Do(change=lambda body: NOTHING) if "list-type" in asked.path else None)
    with pytest.raises(CheckpointError, match="exists already"):
        sw.save(small_state(2), url)
    proxy.reset()
    assert sw.verify(url).ok
    assert sw.restore(small_state(9), url).digest == digest_of_seed(1)


NOTHING = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"


def test_a_failure_after_the_commit_deletes_nothing(proxy: Proxy) -> None:
    """As where another rank is gone when rank 0 has published."""
    url = f"{ROOT}/committed"
    sw.save(small_state(1), f"{ROOT}/other")
    target = ObjectTarget(url)
    ranks = Ranks.current()
    target.begin([], lambda: None, ranks)
    for name in files_below(f"{ROOT}/other"):
        if name != "manifest.json":
            write(f"{url}/{name}", read_whole(f"{ROOT}/other/{name}", 10**6))
    target.commit(lambda: read_manifest(f"{ROOT}/other"), ranks)
    target.discard(ranks)
    assert sw.verify(url).ok


def write(url: str, content: bytes) -> None:
    with ObjectWriter(url) as file:
        file.write(content)


def test_a_discard_deletes_the_manifest_where_no_listing_shows_it(proxy: Proxy) -> None:
    url = f"{ROOT}/discarded"
    sw.save(small_state(1), url)
    proxy.reset(lambda asked: Do(change=lambda body: NOTHING) if "list-type" in asked.path else None)
    delete_below(url)
    proxy.reset()
    assert not is_file(f"{url}/manifest.json")
