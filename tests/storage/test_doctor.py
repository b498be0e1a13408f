"""``shardwise doctor`` on a bucket: what is refused, conditions that do not hold, and a healthy one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import shardwise as sw
from shardwise.doctor.examine import collect, findings_of
from tests.harness.object_store import BUCKET, Asked, Do, Proxy, S3Server
from tests.storage.test_saves import small_state

URL = f"s3://{BUCKET}/doctor"


def rules(*urls: str) -> dict[str, str]:
    own = {f.rule for f in findings_of(collect(()))}
    return {f.rule: f.bites for f in findings_of(collect(urls)) if f.rule not in own}


def test_a_healthy_bucket(proxy: Proxy, server: S3Server) -> None:
    assert rules(URL) == {}
    assert server.keys("doctor") == []
    assert proxy.counts.requests["PUT"] < 10


def test_a_run_in_a_bucket(proxy: Proxy, server: S3Server) -> None:
    with sw.Checkpointer(f"{URL}/run") as run:
        run.save(small_state(1), 1)
    assert rules(f"{URL}/run") == {}
    damaged = next(key for key in server.keys("doctor/run") if key.endswith(".safetensors"))
    server.put(damaged, b"short")
    assert rules(f"{URL}/run").keys() == {"checkpoint.damaged"}
    server.clear("doctor/run")


def _refused(asked: Asked) -> Do | None:
    return Do(status=403)


def _not_written(asked: Asked) -> Do | None:
    return Do(status=403) if asked.method == "PUT" else None


def _no_deletion(asked: Asked) -> Do | None:
    return Do(status=403) if asked.method in ("DELETE", "POST") else None


SPOILT: dict[str, tuple[str, Callable[[Asked], Do | None], str]] = {
    "refused": ("bucket.refused", _refused, "can't list objects under this prefix"),
    "not written": ("bucket.refused", _not_written, "can't write objects under this prefix"),
    "no If-None-Match": (
        "bucket.no-conditions",
        lambda asked: Do(without=("if-none-match",)),
        "a second write under 'only if absent' replaced the first",
    ),
    "no If-Match": (
        "bucket.no-conditions",
        lambda asked: Do(without=("if-match",)),
        "'only if unchanged' replaced an object that had changed",
    ),
    "no deletion": ("bucket.no-delete", _no_deletion, "nothing can be deleted"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_bucket(what: str, proxy: Proxy, server: S3Server) -> None:
    rule, decide, words = SPOILT[what]
    proxy.reset(decide)
    found = rules(URL)
    assert found.keys() == {rule}
    assert words in found[rule]
    server.clear("doctor")


@pytest.mark.parametrize(
    ("action", "rule", "words"),
    [
        ("s3:PutObject", "bucket.refused", "can't write objects under this prefix"),
        ("s3:DeleteObject", "bucket.no-delete", "nothing can be deleted"),
    ],
)
def test_a_policy_that_denies(action: str, rule: str, words: str, proxy: Proxy, server: S3Server) -> None:
    """The server itself refuses, as the bucket's policy says."""
    deny = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]}).encode()
    server.call("PUT", f"/{BUCKET}?policy", policy)
    try:
        found = rules(URL)
    finally:
        server.call("DELETE", f"/{BUCKET}?policy")
        server.clear("doctor")
    assert found.keys() == {rule}
    assert words in found[rule]
