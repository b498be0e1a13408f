"""S3 and compatible stores, Google Cloud Storage, Azure, and HTTP, by obstore (Rust's ``object_store``)."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import CheckpointError, FormatError, IntegrityError, SourceError
from .other_clients import (
    NOWHERE,
    explained,
    has_answered,
    is_forbidden,
    is_lost,
    is_too_short,
    is_unexplained,
    is_unknown_upload,
    text_of,
)
from .records import (
    LISTED_AT_ONCE,
    MOST_IN_FOLDER,
    Cut,
    Held,
    Listing,
    Requests,
    Stat,
    Tries,
    again,
    level,
    no_panics,
    note,
    pages_below,
    pages_of_level,
)

#: Some objects of a listing, as obstore gives them.
_Objects = list[Any]
#: Bytes that come from a body at a time.
_CHUNK_BYTES = 1024**2
#: An object of more bytes is written in parts of so many, a few at a time. S3 takes at most 10,000.
_PART_BYTES, _PARTS_AT_ONCE, _MOST_PARTS = 8 * 1024**2, 3, 9_000
#: Metadata of an object that was written in parts.
_MARK = "shardwise"
#: An object that is written under a condition, and read back whole.
_MOST_SMALL_BYTES = 256 * 1024**2
#: Of requests that got no reply, or 429 or 5xx. obstore's own default would go on for 3 minutes.
_RETRY = {
    "max_retries": 8,
    "backoff": {
        "base": 2,
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=5),
    },
    "retry_timeout": timedelta(seconds=60),
}
#: Hosts that give AWS's credentials.
_OF_AWS = ("169.254.0.0/16", "fd00:ec2::/32", "amazonaws.com", "amazonaws.com.cn")
_CLIENT = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=60)}


class ObstoreStore:
    """As :class:`.Store`."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        self._root = root
        _check_process(root)
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import HTTPStore, from_url
        except ImportError as error:
            raise SourceError(
                f"reading {root.partition('://')[0]} URLs needs obstore: pip install 'shardwise[store]'",
                path=root,
            ) from error
        self._obstore = obstore
        self._takes_bare_tags = False
        self._lists_in_order = root.startswith(("s3://", "s3a://")) and not root.endswith("--x-s3")
        given = {**_credentials(root, options), **options}
        given["retry_config"] = {**_RETRY, **(given.get("retry_config") or {})}
        plain = {"allow_http": True} if _is_plain(root, options) else {}
        own = given.get("client_options") or {}
        given["client_options"] = {**_CLIENT, **plain, **_only_to_endpoint(root, options), **own}
        is_http = root.startswith(
            ("http://", "https://")
        )  # else obstore takes hosts of clouds for their stores
        try:
            self._store = HTTPStore.from_url(root, **given) if is_http else from_url(root, **given)
        except (BaseError, ValueError, TypeError) as error:
            raise SourceError(f"can't be opened as a store: {text_of(error)}", path=root) from None

    def list(self, folder: str) -> Listing:
        if self._lists_in_order:
            return self._list_in_pages(folder)
        note(Requests(lists=1))
        found = self._ask("listing it", folder, lambda s: level(self._obstore, s, folder))
        names = len(found["objects"]) + len(found["common_prefixes"])
        note(Requests(lists=max(0, (names - 1) // LISTED_AT_ONCE)))  # further pages
        start = len(folder) + 1 if folder else 0
        files = {
            str(one["path"])[start:]: _stat(one) for one in found["objects"] if len(str(one["path"])) > start
        }
        folders = frozenset(str(path)[start:] for path in found["common_prefixes"])
        return Listing(files, folders - {""})

    def _list_in_pages(self, folder: str) -> Listing:
        start, files, folders = len(folder) + 1 if folder else 0, dict[str, Stat](), set[str]()
        for page in self._pages(folder, pages_of_level):
            for one in page:
                name, slash, _ = str(one["path"])[start:].partition("/")
                if slash:
                    folders.add(name)
                elif name:
                    files[name] = _stat(one)
            if len(files) + len(folders) > MOST_IN_FOLDER:
                raise SourceError(
                    f"the store lists more than {MOST_IN_FOLDER} names in one folder, which is the limit",
                    path=f"{self._root}/{folder}",
                )
        for name in [n for n, stat in files.items() if stat.nbytes == 0]:
            if self._is_marker(f"{folder}/{name}" if folder else name):
                del files[name]
                folders.add(name)
        return Listing(files, frozenset(folders))

    def list_below(self, folder: str) -> Iterator[tuple[str, Stat]]:
        start = len(folder) + 1 if folder else 0
        for page in self._pages(folder, pages_below):
            yield from ((str(one["path"])[start:], _stat(one)) for one in page)

    def _pages(self, folder: str, listing: Any) -> Iterator[_Objects]:
        def ask(next_page: Callable[[], _Objects]) -> _Objects:
            try:
                return self._ask("listing it", folder, lambda s: next_page())  # type: ignore[no-any-return]
            except FileNotFoundError:  # some stores say so of a folder without objects
                return []

        url = f"{self._root}/{folder}" if folder else self._root
        return listing(self._obstore, self._store, folder, url, ask)  # type: ignore[no-any-return]

    def _is_marker(self, key: str) -> bool:
        """Whether what a listing shows as an object is ``key/``, which some programs write where a file system has a directory."""
        from obstore.exceptions import BaseError

        note(Requests(heads=1))
        try:
            again(lambda: self._obstore.head(self._store, key), is_lost)
        except FileNotFoundError:
            return True
        except (BaseError, OSError):
            return False
        return False

    def stat(self, key: str) -> Stat | None:
        from obstore.exceptions import BaseError

        def head(store: Any) -> Any:
            try:
                return self._obstore.head(store, key)
            except FileNotFoundError:
                raise
            except (BaseError, OSError) as error:
                if is_forbidden(error) and self._lists_without(key):
                    raise FileNotFoundError(key) from None
                if is_unexplained(error):
                    note(Requests(gets=1))
                    self._obstore.get(store, key)  # raises: its reply has a body, which says why
                raise

        note(Requests(heads=1))
        try:
            return _stat(self._ask("looking at it", key, head))
        except FileNotFoundError:
            return None

    def _lists_without(self, key: str) -> bool:
        """Whether a listing shows that there is no such object: S3 says 403 of it to those who may list under some prefixes alone."""
        folder, _, name = key.rpartition("/")
        for listed in (folder, key):
            try:
                found = self.list(listed)
            except SourceError:
                continue
            if listed == folder:
                return name not in found.files
            return bool(found.files or found.folders)
        return False

    def read(self, key: str, start: int, stop: int) -> tuple[Stat | None, Iterator[bytes]]:
        def get(store: Any) -> Any:
            return self._obstore.get(store, key, options={"range": (start, stop)})

        note(Requests(gets=1, bytes_read=stop - start))
        try:
            got = self._ask("reading it", key, get)
        except _NotThatLong:
            raise IntegrityError(
                f"has fewer than {start + 1} bytes: truncated, or replaced", path=f"{self._root}/{key}"
            ) from None
        return _stat(got.meta), self._chunks(got, key)

    def write(self, key: str, pieces: Iterator[memoryview], nbytes: int) -> None:
        file = self._writer(key, nbytes, most_whole=_part_bytes(nbytes))
        try:
            for piece in pieces:
                file.write(piece)
            file.close()
        except BaseException:
            file.give_up()
            raise

    def writer(self, key: str, nbytes: int) -> _Writer:
        return self._writer(key, nbytes, most_whole=_part_bytes(nbytes) - 1)

    def _writer(self, key: str, nbytes: int, *, most_whole: int) -> _Writer:
        url = f"{self._root}/{key}"
        _check_process(url)
        return _Writer(self._obstore, self._store, key, url, _part_bytes(nbytes), most_whole)

    def create(self, key: str, content: bytes) -> bool:
        return self._put_if(key, content, "create")

    def replace(self, key: str, content: bytes, held: Held) -> bool:
        if not self._takes_bare_tags and self._put_if(key, content, held.version, held):
            return True
        found = self.get(key, _MOST_SMALL_BYTES)
        if found is None or found.version != held.version:
            return found is not None and found.content == content
        # The store refuses the tag of the very object that is there: Ceph takes tags without quotes alone, others both.
        self._takes_bare_tags = True
        bare = {name: tag.strip('"') for name, tag in held.version.items()}
        return self._put_if(key, content, bare, held)

    def _put_if(self, key: str, content: bytes, condition: Any, held: Held | None = None) -> bool:
        """Write a small object under a condition, in obstore's form, where ``held`` is; whether it has this content then."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        _check_process(f"{self._root}/{key}")
        tries = Tries()
        while True:
            note(Requests(puts=1, bytes_written=len(content)))
            try:
                with no_panics():
                    self._obstore.put(self._store, key, content, mode=condition)
                return True
            except (BaseError, OSError) as error:
                failure, lost = _write_failed(f"{self._root}/{key}", error), is_lost(error)
                is_refused = isinstance(error, AlreadyExistsError | PreconditionError)
            # The write may have been carried out, and its reply lost.
            try:
                found = self.get(key, _MOST_SMALL_BYTES)
            except SourceError:
                raise failure from None
            if found is not None and found.content == content:
                return True
            if is_refused:
                return False
            unchanged = found is None if held is None else found is not None and found.version == held.version
            if not unchanged and (lost or found is None):
                return False  # another writer was there
            if not (lost and unchanged and tries.another()):
                raise failure

    def get(self, key: str, most_bytes: int) -> Held | None:
        def whole(store: Any) -> Held:
            found = self._obstore.get(store, key)
            if found.meta["size"] > most_bytes:
                raise FormatError(
                    f"has {found.meta['size']} bytes, the limit is {most_bytes}", path=f"{self._root}/{key}"
                )
            content = bytes(found.bytes())
            return Held(
                content, {name: found.meta[name] for name in ("e_tag", "version") if found.meta.get(name)}
            )

        note(Requests(gets=1))
        try:
            found: Held = self._ask("reading it", key, whole)
            return found
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        from obstore.exceptions import BaseError

        _check_process(f"{self._root}/{key}")
        note(Requests(deletes=1))
        try:
            again(lambda: self._obstore.delete(self._store, key), is_lost)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise CheckpointError(f"{self._root}/{key}: deleting it failed: {explained(error)}") from None

    def _chunks(self, got: Any, key: str) -> Iterator[bytes]:
        from obstore.exceptions import BaseError

        try:
            with no_panics():
                yield from got.stream(min_chunk_size=_CHUNK_BYTES)
        except (BaseError, OSError) as error:
            raise Cut(text_of(error)) from None

    def _ask(self, what: str, key: str, call: Any) -> Any:
        """Make a call. Raises ``FileNotFoundError`` if there is no such object, else :class:`SourceError`."""
        from obstore.exceptions import BaseError

        url = f"{self._root}/{key}" if key else self._root
        _check_process(url)
        try:
            return again(lambda: call(self._store), is_lost)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise SourceError(f"{what} failed: no such bucket", path=url) from None
            raise FileNotFoundError(url) from None
        except TimeoutError:
            raise SourceError(
                f"{what} failed: the store makes no progress; check the endpoint", path=url
            ) from None
        except (BaseError, OSError) as error:
            if is_too_short(error):
                raise _NotThatLong(f"{what} failed: {explained(error)}", path=url) from None
            raise SourceError(f"{what} failed: {explained(error)}", path=url) from None


class _NotThatLong(SourceError):
    """A range begins after the end of an object. A store may say so of any request."""


class _Writer:
    """As :class:`.ObjectFile`. Up to ``most_whole`` bytes are one request, more are an upload of parts."""

    def __init__(self, client: Any, store: Any, key: str, url: str, part_bytes: int, most_whole: int) -> None:
        self._client, self._store, self._key, self._url = client, store, key, url
        self._part_bytes, self._most_whole, self._nbytes = part_bytes, most_whole, 0
        self._held: list[bytes] = []
        """What came before the upload began."""
        self._file: Any = None
        self._is_away = False
        self._mark = secrets.token_hex(16)
        """Tells this upload's object from any other of that name."""

    def write(self, data: memoryview) -> None:
        own = bytes(data)  # obstore keeps what it is given until it is sent, without a copy
        self._nbytes += len(own)
        if self._file is not None:
            self._do(lambda: self._file.write(own))
            return
        self._held.append(own)
        if self._nbytes > self._most_whole:
            self._do(lambda: again(self._begin, is_lost))
            self._held = []

    def close(self) -> None:
        if self._file is None:
            note(Requests(puts=1, bytes_written=self._nbytes))
            self._do(lambda: again(self._put, is_lost))
            return
        note(_in_parts(self._nbytes, self._part_bytes))
        self._do(self._complete)

    def give_up(self) -> None:
        """Let the store forget the parts, unless it does not reply."""
        if self._file is not None and not self._is_away:
            with contextlib.suppress(Exception), no_panics():
                self._file.__exit__(Exception, None, None)

    def _put(self) -> None:
        self._client.put(self._store, self._key, b"".join(self._held), use_multipart=False)

    def _begin(self) -> None:
        """Begin an upload, with what was held. One whose reply was lost has no parts: the store's rule for old uploads ends it."""
        file = self._client.open_writer(
            self._store,
            self._key,
            attributes={_MARK: self._mark},
            buffer_size=self._part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )
        for own in self._held:
            file.write(own)
        self._file = file

    def _complete(self) -> None:
        """Put the parts together. A store that did so, and whose reply was lost, knows no such upload when it is asked again."""
        try:
            self._file.close()
        except Exception as error:
            if not ((is_lost(error) or is_unknown_upload(error)) and self._is_there()):
                raise

    def _is_there(self) -> bool:
        def look() -> bool:
            note(Requests(gets=1))
            found = self._client.get(self._store, self._key, options={"range": (0, 1)})
            is_whole = bool(found.meta["size"] == self._nbytes)
            return is_whole and found.attributes.get(_MARK) == self._mark

        try:
            return again(look, is_lost)
        except Exception:  # then the first error stands
            return False

    def _do(self, call: Any) -> None:
        from obstore.exceptions import BaseError

        try:
            with no_panics():
                call()
        except (BaseError, OSError) as error:
            self._is_away = not has_answered(error)
            raise _write_failed(self._url, error) from None


def _write_failed(url: str, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{url}: writing it failed: {explained(error)}")


def _part_bytes(nbytes: int) -> int:
    """The size of the parts of an object of about ``nbytes`` bytes."""
    return max(_PART_BYTES, -(-nbytes // _MOST_PARTS))


def _in_parts(nbytes: int, part_bytes: int) -> Requests:
    """What it takes to write an object in parts."""
    return Requests(uploads=1, parts=-(-nbytes // part_bytes), bytes_written=nbytes)


def _stat(meta: Any) -> Stat:
    changed = meta.get("last_modified")
    tag = (meta.get("e_tag") or "").removeprefix("W/").strip('"')
    version = tag or meta.get("version") or (changed.isoformat(timespec="seconds") if changed else None)
    return Stat(int(meta["size"]), version, changed.timestamp() if changed else None)


_process: int | None = None


def _check_process(url: str) -> None:
    """Refuse a fork of a process that has used obstore: the threads that carry out requests are in the parent alone."""
    global _process
    if _process is None:
        _process = os.getpid()
    if os.getpid() != _process:
        raise SourceError(
            "this process was forked from one that has used object stores, and can't use them; start it by spawn or forkserver",
            path=url,
        )


def _is_plain(root: str, options: Mapping[str, Any]) -> bool:
    """Whether a store is asked without TLS, because its URL or its endpoint says so."""
    given = [value for name, value in options.items() if "endpoint" in name.lower()]
    if not given and root.startswith("s3"):
        given = [value for name, value in os.environ.items() if name.startswith("AWS_ENDPOINT")]
    return root.startswith("http://") or any(str(value).startswith("http://") for value in given)


def _only_to_endpoint(root: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a client that follows no redirect from an S3 endpoint to another host, which would get the session token.

    obstore has no option for it: so all other hosts are behind a proxy where nothing can listen. Without an endpoint, the store is AWS.
    A proxy of the user's own decides about hosts itself.
    """
    named = {name.lower(): value for name, value in [*os.environ.items(), *options.items()]}
    endpoints = [str(value) for name, value in named.items() if re.match(r"(aws_)?endpoint", name) and value]
    has_proxy = any(named.get(f"{kind}_proxy") for kind in ("http", "https", "all"))
    is_open = named.get("skip_signature") or named.get("aws_skip_signature")
    if not root.startswith("s3") or not endpoints or has_proxy or is_open:
        return {}
    if "proxy_url" in (options.get("client_options") or {}):
        return {}
    others = ("aws_container_credentials_full_uri", "metadata_endpoint", "aws_metadata_endpoint")
    asked = [*endpoints, *(str(named[name]) for name in others if named.get(name))]
    hosts = {urlsplit(url).hostname for url in asked}
    if None in hosts:
        return {}
    return {
        "proxy_url": f"http://{NOWHERE}",
        "proxy_excludes": ",".join([*sorted(filter(None, hosts)), *_OF_AWS]),
    }


def _credentials(root: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Credentials out of files of the AWS tools, which obstore does not read by itself, if nothing else gives any."""
    given = {name.lower().removeprefix("aws_") for name in options}
    known = given & {"access_key_id", "credential_provider", "skip_signature"}
    if not root.startswith("s3") or known or "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    folder = Path.home() / ".aws"
    if not ("AWS_PROFILE" in os.environ or (folder / "credentials").exists() or (folder / "config").exists()):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return {"credential_provider": Boto3CredentialProvider()}
    except Exception as error:  # boto3 raises errors of its own for a profile that it does not know
        if "AWS_PROFILE" not in os.environ:
            return {}
        reason = "needs boto3: pip install boto3" if isinstance(error, ImportError) else text_of(error)
        raise SourceError(f"the profile that AWS_PROFILE names: {reason}", path=root) from None
