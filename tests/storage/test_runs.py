"""A run's steps in a store: saved, kept, resumed on other ranks, set aside; one run at a time; nothing that is not committed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.render import RootContents, contents_of
from shardwise.errors import CheckpointError, LockedError, NoCheckpointError, ShardwiseError, SourceError
from shardwise.format.header import parse_head
from shardwise.publish import line as head_line
from shardwise.storage import counting, files_below, folders_in, is_file, names_in, read_whole
from tests.harness import models
from tests.harness.command import runner
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, S3Server
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly_but
from tests.storage._states import trained
from tests.storage.test_saves import small_state, use

ROOT = f"s3://{BUCKET}/runs"


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port) as found:
        use(found.endpoint)
        yield found


@pytest.fixture
def root() -> str:
    return f"{ROOT}/{os.urandom(6).hex()}"


def head_of(root: str) -> Any:
    return parse_head(read_whole(f"{root}/head.json", 10**6), root)


def saved(root: str, *steps: int, **options: Any) -> sw.Checkpointer:
    """An open run with these steps; the state of step N has the seed N."""
    checkpoints = sw.Checkpointer(root, **options)
    for step in steps:
        checkpoints.save(small_state(step), step)
    checkpoints.wait()
    return checkpoints


def resumed(root: str) -> tuple[int, str] | None:
    state = small_state(99)
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(state)
    return None if report is None else (report.step, report.digest)


def digest_of_seed(tmp_path: Path, seed: int) -> str:
    path = tmp_path / f"expected-{os.urandom(4).hex()}"
    sw.save(small_state(seed), path)
    return sw.restore(small_state(9), path).digest


# ----------------------------------------------------------------------------------------------------
# On ranks


def run_both(hub: str, endpoint: str, roots: list[str], mode: Any) -> list[str]:
    """The same steps in a store and in a directory."""
    use(endpoint)
    digests = []
    for root in roots:
        state = trained(hub, 1)
        with sw.Checkpointer(root, keep_last=2, keep_every=3, mode=mode) as checkpoints:
            assert checkpoints.resume(state) is None
            for step in (1, 3, 4, 5):
                checkpoints.save(state, step)
            checkpoints.wait()
            with torch.no_grad():
                for parameter in state.models["model"].parameters():
                    parameter.zero_()
            report = checkpoints.resume(state)
            assert report is not None
            assert (report.step, report.exact, report.damaged) == (5, True, {})
        digests.append(report.digest)
    return digests


def resume_both(hub: str, endpoint: str, roots: list[str]) -> list[tuple[int, str]]:
    use(endpoint)
    found = []
    for root in roots:
        with sw.Checkpointer(root) as checkpoints:
            report = checkpoints.resume(trained(hub, 2))
            assert report is not None
            found.append((report.step, report.digest))
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    models.write_hub_directory("qwen3", root / "qwen3", torch.float32)
    return root


@pytest.mark.parametrize("mode", nightly_but(("sync", "async"), "async"))
def test_as_in_a_directory(
    hub: Path, proxy: Proxy, ranks: RankPool, tmp_path: Path, root: str, mode: str
) -> None:
    """The same steps are kept, with the same state, on the same and on another number of ranks."""
    given = {"hub": str(hub), "endpoint": proxy.endpoint, "roots": [root, str(tmp_path / "run")]}
    found = ranks.run_ranks(2, run_both, mode=mode, **given)
    assert len({digest for one in found for digest in one}) == 1
    head = head_of(root)
    assert sorted(head.steps) == [3, 4, 5]
    assert head.aside == ()
    assert set(names_in(root)) == {"head.json", *head.steps.values()}
    local = tmp_path / "run" / "step-00000005"
    names = {p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()}
    assert files_below(f"{root}/{head.steps[5]}").keys() == names
    assert sw.verify(f"{root}/{head.steps[5]}").ok
    for world_size in (1, 3):
        pairs = [pair for one in ranks.run_ranks(world_size, resume_both, **given) for pair in one]
        assert len(set(pairs)) == 1
        assert pairs[0][0] == 5


# ----------------------------------------------------------------------------------------------------
# The line of a run


def test_steps_that_a_resume_supersedes_or_finds_damaged(
    proxy: Proxy, server: S3Server, root: str, tmp_path: Path
) -> None:
    saved(root, 1, 2, 3, 4).close()
    newest = head_of(root).steps[4]
    name = next(n for n in files_below(f"{root}/{newest}") if n.startswith("model/"))
    content = bytearray(read_whole(f"{root}/{newest}/{name}", 10**6))
    content[-1] ^= 1
    server.put(f"{root.removeprefix(f's3://{BUCKET}/')}/{newest}/{name}", bytes(content))
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(small_state(99), step=2)
        assert report is not None
        assert (report.step, report.superseded) == (2, (4, 3))
        checkpoints.save(small_state(5), 3)
    head = head_of(root)
    assert sorted(head.steps) == [1, 2, 3]
    assert [one.why for one in head.aside] == ["superseded", "superseded"]
    assert resumed(root) == (3, digest_of_seed(tmp_path, 5))


def test_damage_falls_back(proxy: Proxy, server: S3Server, root: str, tmp_path: Path) -> None:
    saved(root, 1, 2).close()
    head = head_of(root)
    server.call("DELETE", f"/{root.removeprefix('s3://')}/{head.steps[2]}/manifest.json")
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(small_state(99))
        assert report is not None
        assert (report.step, report.digest) == (1, digest_of_seed(tmp_path, 1))
        assert list(report.damaged) == [2]
    assert [(one.name, one.why) for one in head_of(root).aside] == [(head.steps[2], "damaged")]


def test_the_run_that_resumed_last_holds_the_line(proxy: Proxy, root: str, tmp_path: Path) -> None:
    """The run before is refused at its next save, before it sends anything."""
    first = saved(root, 1, 2)
    second = sw.Checkpointer(root)
    assert second.resume(small_state(99)) is not None
    sent: list[str] = []
    proxy.reset(lambda asked: sent.append(asked.path) if asked.method == "PUT" else None)
    with pytest.raises(
        LockedError, match=r"another run has taken over these steps.*written by process \d+ on"
    ):
        first.save(small_state(3), 3)
    assert not sent
    second.save(small_state(4), 3)
    with pytest.raises(LockedError):
        first.resume(small_state(99))
    head = head_of(root)
    assert set(folders_in(root)) == set(head.steps.values())
    assert resumed(root) == (3, digest_of_seed(tmp_path, 4))


def test_training_waits_for_no_request(proxy: Proxy, root: str) -> None:
    """A save in the background asks the store in the background only; a run that was taken over hears of it there."""
    with saved(root, 1, mode="async") as checkpoints:
        with counting() as asked:
            checkpoints.save(small_state(2), 2)
        assert asked.total == 0
        assert checkpoints.wait() is not None
        with sw.Checkpointer(root) as other:
            assert other.resume(small_state(99)) is not None
        checkpoints.save(small_state(3), 3)
        with pytest.raises(LockedError, match="another run has taken over these steps"):
            checkpoints.wait()


def test_what_lies_there(proxy: Proxy, root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After retention: the steps, and all that is paid for, also what a resume set aside."""
    with caplog.at_level("INFO"), saved(root, 1, 2, 3, keep_last=2) as checkpoints:
        stored = checkpoints.stored
        assert stored is not None
        found = {n: s.nbytes for n, s in files_below(root).items() if s is not None}
        assert (stored.steps, stored.set_aside) == ((3, 2), 0)
        assert (stored.objects, stored.nbytes) == (len(found), sum(found.values()))
    assert f"{root}: contains 2 steps and 0 quarantined ones: {stored.objects} objects" in caplog.text
    with sw.Checkpointer(root, keep_last=2) as checkpoints:
        assert checkpoints.stored is None
        checkpoints.resume(small_state(9), step=2)
        checkpoints.save(small_state(4), 4)
        assert checkpoints.stored is not None
        assert (checkpoints.stored.steps, checkpoints.stored.set_aside) == ((4, 2), 1)
        assert checkpoints.stored.objects == len(files_below(root))
        whole = f"{root.removeprefix(f's3://{BUCKET}/')}/"
        proxy.reset(lambda asked: Do(status=403) if parse_qs(asked.path).get("prefix") == [whole] else None)
        checkpoints.save(small_state(5), 5)  # the listing is refused, which is no matter
        assert "can't be listed after the save" in caplog.text
        proxy.reset()
    for place, options in ((root, {}), (tmp_path / "run", {"keep_last": 1})):
        with sw.Checkpointer(place, **options) as checkpoints:
            assert checkpoints.resume(small_state(9)) is None or place == root
            checkpoints.save(small_state(6), 6)
            assert checkpoints.stored is None


def test_a_run_that_is_taken_over_while_it_saves(proxy: Proxy, root: str, tmp_path: Path) -> None:
    """It has written its payload and its manifest, and is refused at the head: its payload is deleted."""
    first = saved(root, 1)
    other = sw.Checkpointer(root)

    def take_over() -> None:
        proxy.reset()
        assert other.resume(small_state(99)) is not None

    seen: list[str] = []

    def decide(asked: Asked) -> Do | None:
        if asked.method == "PUT" and asked.path.endswith("manifest.json"):
            seen.append(asked.path)
            return Do(before=take_over)
        return None

    proxy.reset(decide)
    with pytest.raises(LockedError):
        first.save(small_state(2), 2)
    assert seen
    assert set(folders_in(root)) == set(head_of(root).steps.values())
    assert resumed(root) == (1, digest_of_seed(tmp_path, 1))


def test_a_head_that_changes_right_before_it_is_replaced(proxy: Proxy, root: str, tmp_path: Path) -> None:
    """After this run has read it: the store itself refuses the write."""
    first, other = saved(root, 1), sw.Checkpointer(root)

    def decide(asked: Asked) -> Do | None:
        if asked.method == "PUT" and asked.path.endswith("head.json"):
            proxy.reset()
            return Do(before=lambda: other.resume(small_state(99)))
        return None

    proxy.reset(decide)
    with pytest.raises(LockedError, match="another run has taken over these steps meanwhile"):
        first.save(small_state(2), 2)
    assert set(folders_in(root)) == set(head_of(root).steps.values())
    assert resumed(root) == (1, digest_of_seed(tmp_path, 1))


@pytest.mark.parametrize(("what", "nth"), [("/model/", 1), ("manifest.json", 1), ("manifest.json", 2)])
def test_a_step_that_the_other_run_deletes_while_it_is_resumed(
    proxy: Proxy, root: str, what: str, nth: int
) -> None:
    """It is not damaged: another run holds the line, and its retention deleted the step."""
    asks = 0
    first = saved(root, 1, keep_last=1)

    def go_on() -> None:
        proxy.reset()
        first.save(small_state(2), 2)

    def decide(asked: Asked) -> Do | None:
        nonlocal asks
        asks += asked.method == "GET" and what in asked.path
        return Do(before=go_on) if asks == nth else None

    proxy.reset(decide)
    with (
        sw.Checkpointer(root) as second,
        pytest.raises(LockedError, match="another run has taken over these"),
    ):
        second.resume(small_state(99))
    assert sorted(head_of(root).steps) == [2]
    assert head_of(root).aside == ()
    first.save(small_state(3), 3)


def test_no_save_goes_on_from_a_resume_that_could_not_set_newer_steps_aside(
    proxy: Proxy, root: str, tmp_path: Path
) -> None:
    saved(root, 1, 2).close()
    checkpoints = sw.Checkpointer(root)
    proxy.reset(lambda asked: Do(status=403) if asked.method == "PUT" and "head.json" in asked.path else None)
    with pytest.raises(CheckpointError, match="403"):
        checkpoints.resume(small_state(99), step=1)
    proxy.reset()
    with pytest.raises(CheckpointError, match="did not resume from"):
        checkpoints.save(small_state(3), 3)
    report = checkpoints.resume(small_state(99))
    assert report is not None
    assert (report.step, report.digest) == (2, digest_of_seed(tmp_path, 2))
    checkpoints.save(small_state(3), 3)
    assert sorted(head_of(root).steps) == [1, 2, 3]


def test_a_second_run_that_did_not_resume(proxy: Proxy, root: str) -> None:
    saved(root, 1)
    with pytest.raises(CheckpointError, match=r"contains steps \[1\] that this run did not resume from"):
        saved(root, 2)


def test_a_reply_to_the_head_that_is_lost(proxy: Proxy, root: str, tmp_path: Path) -> None:
    checkpoints = saved(root, 1)
    proxy.reset(
        lambda asked: (
            Do(lose_reply=True) if asked.method == "PUT" and asked.path.endswith("head.json") else None
        )
    )
    checkpoints.save(small_state(2), 2)
    proxy.reset()
    checkpoints.save(small_state(3), 3)
    assert sorted(head_of(root).steps) == [1, 2, 3]
    assert resumed(root) == (3, digest_of_seed(tmp_path, 3))


def test_a_head_whose_write_is_in_doubt(proxy: Proxy, root: str, tmp_path: Path) -> None:
    """The write is carried out, and then the head can't be read: the save raises, and the next one finds out what happened."""
    checkpoints = saved(root, 1)
    away = threading.Event()

    def decide(asked: Asked) -> Do | None:
        if away.is_set() and "head.json" in asked.path:
            return Do(status=503)
        if asked.method == "PUT" and asked.path.endswith("head.json"):
            away.set()
            return Do(lose_reply=True)
        return None

    proxy.reset(decide)
    with pytest.raises(CheckpointError, match=r"head\.json: writing it failed"):
        checkpoints.save(small_state(2), 2)
    proxy.reset()
    with pytest.raises(CheckpointError, match="step 2 is not newer than the published step 2"):
        checkpoints.save(small_state(2), 2)
    checkpoints.save(small_state(3), 3)
    assert sorted(head_of(root).steps) == [1, 2, 3]
    for step in (2, 3):
        found = sw.restore(small_state(99), f"{root}/{head_of(root).steps[step]}")
        assert found.digest == digest_of_seed(tmp_path, step)


# ----------------------------------------------------------------------------------------------------
# What is no step


def test_a_late_listing(proxy: Proxy, root: str, tmp_path: Path) -> None:
    """Objects that a listing does not show yet are no damage: head and manifest name them."""
    saved(root, 1, 2).close()
    empty = b'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>'
    late: list[str] = []

    def decide(asked: Asked) -> Do | None:
        if asked.method == "GET" and "list-type" in asked.path:
            late.append(asked.path)
            return Do(change=lambda body: empty)
        return None

    proxy.reset(decide)
    with sw.Checkpointer(root, keep_last=2) as checkpoints:
        report = checkpoints.resume(small_state(99))
        assert report is not None
        assert (report.step, report.digest, report.damaged) == (2, digest_of_seed(tmp_path, 2), {})
        checkpoints.save(small_state(3), 3)
    assert late
    assert sorted(head_of(root).steps) == [2, 3]
    assert sw.verify(f"{root}/{head_of(root).steps[3]}").ok
    proxy.reset()
    assert resumed(root) == (3, digest_of_seed(tmp_path, 3))


def test_leftovers_are_swept_by_age(
    proxy: Proxy, server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = root.removeprefix(f"s3://{BUCKET}/")
    server.put(f"{prefix}/step-00000007.0123456789abcdef/model/a", b"1")
    server.put(f"{prefix}/step-00000008.0123456789abcdef/manifest.json", b"of another program")
    server.put(f"{prefix}/.probe-0123456789abcdef", b"1")
    server.put(f"{prefix}/.probe-of-mine", b"1")
    saved(f"{root}-other", 1, 2).close()
    copied = head_of(f"{root}-other").steps[2]
    sw.copy_checkpoint(f"{root}-other/{copied}", f"{root}/{copied}")
    server.put(f"{prefix}/step-00000007.mine/model/a", b"1")
    server.put(f"{prefix}/notes/step-00000007.0123456789abcdef", b"1")
    with pytest.raises(CheckpointError, match=r"no head\.json"):
        saved(root, 1)
    server.put(f"{prefix}/head.json", parse_head_text())
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(small_state(1), 1)
    assert is_file(f"{root}/step-00000007.0123456789abcdef/model/a")
    monkeypatch.setattr(head_line, "LEFT_AFTER_S", -1.0)
    with sw.Checkpointer(root) as checkpoints:
        assert checkpoints.resume(small_state(99)) is not None
        checkpoints.save(small_state(2), 2)
    assert set(names_in(root)) == {
        *head_of(root).steps.values(),
        "head.json",
        "step-00000007.mine",
        "step-00000008.0123456789abcdef",
        copied,
        ".probe-of-mine",
        "notes",
    }
    assert resumed(root) is not None


def parse_head_text() -> bytes:
    from shardwise.format.header import Head

    return Head().to_bytes()


def test_a_place_without_a_head(proxy: Proxy, server: S3Server, root: str) -> None:
    """Nothing there: a new run. Steps without a head: it was deleted, or they were copied there."""
    assert resumed(root) is None
    saved(root, 1, 2).close()
    name = head_of(root).steps[2]
    server.call("DELETE", f"/{root.removeprefix('s3://')}/head.json")
    with pytest.raises(NoCheckpointError, match=rf"no head\.json.*sw\.restore\(state, '{root}/{name}'\)"):
        resumed(root)
    with pytest.raises(CheckpointError, match=r"no head\.json"):
        saved(root, 3)
    assert sw.restore(small_state(99), f"{root}/{name}").step == 2


def test_a_head_that_is_deleted_while_a_run_saves(proxy: Proxy, server: S3Server, root: str) -> None:
    checkpoints = saved(root, 1)
    server.call("DELETE", f"/{root.removeprefix('s3://')}/head.json")
    with pytest.raises(LockedError, match="it is gone"):
        checkpoints.save(small_state(2), 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: b"{",
        lambda d: json.dumps({**d, "steps": {"1": "step-00000002.0123456789abcdef"}}).encode(),
        lambda d: json.dumps({**d, "steps": {"1": "../other"}}).encode(),
        lambda d: json.dumps({**d, "steps": ["1"]}).encode(),
        lambda d: json.dumps({**d, "nonce": 3}).encode(),
        lambda d: json.dumps({**d, "version": 2}).encode(),
        lambda d: json.dumps({k: v for k, v in d.items() if k != "aside"}).encode(),
    ],
)
def test_a_damaged_head(proxy: Proxy, server: S3Server, root: str, damage: Any) -> None:
    """It is named, and nothing is taken, deleted or written over."""
    saved(root, 1).close()
    before = json.loads(read_whole(f"{root}/head.json", 10**6))
    server.put(f"{root.removeprefix(f's3://{BUCKET}/')}/head.json", damage(before))
    for work in (lambda: resumed(root), lambda: saved(root, 2)):
        with pytest.raises(ShardwiseError, match=r"head\.json"):
            work()
    assert is_file(f"{root}/{before['steps']['1']}/manifest.json")


def test_a_store_without_conditional_writes(proxy: Proxy, root: str) -> None:
    for lost in ("if-none-match", "if-match"):
        proxy.reset(lambda asked, lost=lost: Do(without=(lost,)))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=r"support conditional writes.*shardwise copy"):
            saved(root, 1)
        assert names_in(root) == []


def test_another_run_begins_while_one_looks_for_a_head(proxy: Proxy, root: str) -> None:
    """Its steps are not those of a head that was deleted."""
    checkpoints = sw.Checkpointer(root)

    def begin() -> None:
        proxy.reset()
        saved(root, 1)

    proxy.reset(lambda asked: Do(before=begin) if "list-type" in asked.path else None)
    with pytest.raises(LockedError, match="another run has taken over these steps meanwhile"):
        checkpoints.save(small_state(2), 1)
    assert sorted(head_of(root).steps) == [1]
    assert set(folders_in(root)) == set(head_of(root).steps.values())


def test_two_runs_begin_at_once(proxy: Proxy, root: str, tmp_path: Path) -> None:
    """One begins; the other is refused."""
    start, results = threading.Barrier(2), dict[int, Any]()

    def run(seed: int, checkpoints: sw.Checkpointer, state: sw.TrainState) -> None:
        start.wait()
        try:
            results[seed] = checkpoints.save(state, 1)
        except CheckpointError as error:
            results[seed] = error

    threads = [
        threading.Thread(target=run, args=(seed, sw.Checkpointer(root), small_state(seed))) for seed in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (won,) = [seed for seed, result in results.items() if isinstance(result, sw.reports.SaveReport)]
    assert resumed(root) == (1, digest_of_seed(tmp_path, won))
    assert set(names_in(root)) == {"head.json", *head_of(root).steps.values()}


def test_described_and_verified(proxy: Proxy, server: S3Server, root: str) -> None:
    saved(root, 1, 2, 3).close()
    with sw.Checkpointer(root) as checkpoints:
        assert checkpoints.resume(small_state(99), step=2) is not None
    head = head_of(root)
    server.put(f"{root.removeprefix(f's3://{BUCKET}/')}/step-00000007.0123456789abcdef/model/a", b"1")
    contents = contents_of(root)
    assert isinstance(contents, RootContents)
    assert [(s.step, s.ok, s.fate, s.path) for s in contents.steps] == [
        (s, True, "published", f"{root}/{head.steps[s]}") for s in (2, 1)
    ]
    assert [(s.step, s.ok, s.fate) for s in contents.set_aside] == [(3, True, "superseded")]
    assert all(s.written and s.written.startswith("20") for s in contents.steps)
    assert contents.leftovers == ("step-00000007.0123456789abcdef",)
    with pytest.raises(
        SourceError, match=f"contains steps 1, 2; give one of them, e.g. {root}/{head.steps[2]}"
    ):
        sw.verify(root)
    run = runner().invoke(main, ["verify", root, "--json"])
    assert run.exit_code == 0, run.output
    assert [s["path"] for s in json.loads(run.output)["steps"]] == [f"{root}/{head.steps[s]}" for s in (2, 1)]


def test_a_step_under_the_name_of_another(proxy: Proxy, server: S3Server, root: str) -> None:
    saved(root, 1, 2).close()
    head = head_of(root)
    prefix = root.removeprefix(f"s3://{BUCKET}/")
    server.put(
        f"{prefix}/{head.steps[2]}/manifest.json", read_whole(f"{root}/{head.steps[1]}/manifest.json", 10**7)
    )
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(small_state(99))
        assert report is not None
        assert report.step == 1
        assert "contains step 1, but step 2" in report.damaged[2]
    assert not sw.verify(f"{root}/{head.steps[2]}").ok
