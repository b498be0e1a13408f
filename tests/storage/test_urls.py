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
        ("s3://b/a\n/x", "can't be printed"),
        ("s3://b/a\0", "can't be printed"),
        ("https://h/m?X-Amz-Signature=secret", "may hold a credential"),
        ("https://h/m#secret", "may hold a credential"),
        ("s3://key:secret@b/x", "password"),
    ],
)
def test_refused(url: str, said: str) -> None:
    with pytest.raises(SourceError, match=said) as caught:
        place_of(url)
    assert "secret" not in str(caught.value)
