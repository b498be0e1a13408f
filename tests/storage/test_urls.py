"""What counts as a URL, and which ones are refused."""

from __future__ import annotations

import pytest

from shardwise.errors import SourceError
from shardwise.storage import is_url, place_of


@pytest.mark.parametrize(
    ("url", "root", "key"),
    [
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket", ""),
        ("S3://bucket/a/b/", "s3://bucket", "a/b"),
        ("gs://b/with space/ü/50%25", "gs://b", "with space/ü/50%25"),
        (
            "abfss://container@account.dfs.core.windows.net/x",
            "abfss://container@account.dfs.core.windows.net",
            "x",
        ),
        ("https://host:8080/models/m", "https://host:8080", "models/m"),
        ("memory://x/y", "memory://x", "y"),
        ("s3://b/why?", "s3://b", "why?"),
        ("s3://b/no\u00a0break", "s3://b", "no\u00a0break"),
        ("file:///tmp/x", "file://", "tmp/x"),
    ],
)
def test_parts(url: str, root: str, key: str) -> None:
    assert is_url(url)
    place = place_of(url)
    assert (place.root, place.key) == (root, key)
    assert place.url == (f"{root}/{key}" if key else root)


@pytest.mark.parametrize("path", ["/a/b", "a/b", "./s3:/x", "C:/x", "a b://c", "://x", "", "/s3://b"])
def test_paths_stay_paths(path: str) -> None:
    assert not is_url(path)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://b/../x", "'..'"),
        ("s3://b/a/./x", "'.'"),
        ("s3://b/a//x", "empty"),
        ("s3://b/a\n/x", "control character"),
        ("s3://b/a\0", "control character"),
        ("https://h/m?X-Amz-Signature=secret", "may be a credential"),
        ("https://h/m#secret", "may be a credential"),
        ("https://secret@h/m", "may be a credential"),
        ("s3://key:secret@b/x", "may be a credential"),
        ("s3://key:abc/secret@b/x", "may be a credential"),
        ("s3://b/x?sig=secret", "may be a credential"),
        ("abfss://c@a.dfs.core.windows.net/x?sv=1&sig=secret", "may be a credential"),
        ("hf://user:secret@x/y", "may be a credential"),
    ],
)
def test_refused(url: str, said: str) -> None:
    with pytest.raises(SourceError, match=said) as caught:
        place_of(url)
    assert "secret" not in str(caught.value)
