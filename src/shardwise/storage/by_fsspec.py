"""Any other URL, by fsspec: for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError, SourceError
from .explain import scrubbed
from .records import Held, Listing, ObjectFile, Stat
from .requests import Requests, note
from .tries import again

__all__ = ["FsspecStore"]


class FsspecStore:
    """As :class:`.Store`."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root = root
        try:
            from fsspec.core import url_to_fs

            self._files, _ = url_to_fs(root, **options)
            opened: Any = url_to_fs
            self._path_of: Callable[[str], str] = lambda url: str(opened(url, **options)[1]).strip("/")
        except ImportError as error:
            raise SourceError(
                f"a package for this kind of URL is not installed: {error}", path=root
            ) from None
        except ValueError as error:
            raise SourceError(
                f"no store has URLs of this kind: {error}; expected s3, gs, az, https, or one of fsspec's",
                path=root,
            ) from None
        except Exception as error:  # each file system has errors of its own, whose texts may repeat options
            raise SourceError(f"can't be opened as a store: {type(error).__name__}", path=root) from None

    def list(self, folder: str) -> Listing:
        note(Requests(lists=1))
        try:
            found = self._ask("listing it", folder, lambda url: self._files.ls(url, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return Listing()
        own = self._path_of(self._url(folder))
        names = [(str(one["name"]).strip("/").rpartition("/")[2], one) for one in found]
        inside = [(name, one) for name, one in names if str(one["name"]).strip("/") != own]
        return Listing(
            {name: _stat(one) for name, one in inside if one["type"] == "file"},
            frozenset(name for name, one in inside if one["type"] == "directory"),
        )

    def list_below(self, folder: str) -> Iterator[tuple[str, Stat]]:
        note(Requests(lists=1))
        try:
            found = self._ask("listing it", folder, lambda url: self._files.find(url, detail=True))
        except FileNotFoundError:
            return
        own = self._path_of(self._url(folder))
        for name, info in found.items():
            if str(name).strip("/").startswith(f"{own}/"):
                yield str(name).strip("/")[len(own) + 1 :], _stat(info)

    def stat(self, key: str) -> Stat | None:
        note(Requests(heads=1))
        try:
            found = self._ask("looking at it", key, self._files.info)
        except FileNotFoundError:
            return None
        return _stat(found) if found["type"] == "file" else None

    def read(self, key: str, start: int, stop: int) -> tuple[Stat | None, Iterator[bytes]]:
        note(Requests(gets=1, bytes_read=stop - start))
        content = self._ask("reading it", key, lambda url: self._files.cat_file(url, start=start, end=stop))
        self._files.invalidate_cache()
        stat = self.stat(key)  # after it: an object that was replaced before or meanwhile has another version
        if stat is None:
            raise FileNotFoundError(self._url(key))
        return stat, iter([content])

    def write(self, key: str, pieces: Iterator[memoryview], nbytes: int) -> None:
        raise self._only_read(key)

    def writer(self, key: str, nbytes: int) -> ObjectFile:
        raise self._only_read(key)

    def create(self, key: str, content: bytes) -> bool:
        raise self._only_read(key)

    def get(self, key: str, most_bytes: int) -> Held | None:
        raise self._only_read(key)

    def replace(self, key: str, content: bytes, held: Held) -> bool:
        raise self._only_read(key)

    def delete(self, key: str) -> None:
        raise self._only_read(key)

    def _only_read(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self._url(key)}: URLs of this kind are only read; a checkpoint needs one of s3, gs, az, or a local path"
        )

    def _url(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _ask(self, what: str, key: str, call: Any) -> Any:
        try:
            return again(lambda: call(self._url(key)), _is_lost)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:  # each file system has errors of its own
            raise SourceError(
                f"{what} failed: {type(error).__name__}: {scrubbed(str(error))}", path=self._url(key)
            ) from None


def _is_lost(error: BaseException | None) -> bool:
    """Whether a connection broke: an error of the file system's own may say so by its cause."""
    for _ in range(8):
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        error = None if error is None else error.__cause__ or error.__context__
    return False


def _stat(info: Mapping[str, Any]) -> Stat:
    for name in ("etag", "ETag", "sha256", "blob_id", "lastModified", "LastModified", "mtime", "created"):
        if info.get(name):
            return Stat(int(info["size"] or 0), str(info[name]).strip('"'))
    return Stat(int(info["size"] or 0))
