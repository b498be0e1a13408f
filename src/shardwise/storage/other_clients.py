"""fsspec as a client for stores, and what an error of a store means."""

from __future__ import annotations

import http.client
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import CheckpointError, SourceError
from .records import Held, Listing, ObjectFile, Requests, Stat, again, note, secrets, without_queries

# ----------------------------------------------------------------------------------------------------
# What an error of obstore means: one sentence that says what to do, without what may be a credential.

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9._-]{1,100})</Code>")
_PHRASE = re.compile(r"status code: (\d{3} [A-Za-z -]{1,40})")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")
_ASKED = re.compile(r"Error performing [A-Z]+ ((https?://[^\s/?]+)[^\s?]*)")
_RETRIES = re.compile(r"after (\d+) retries(?:, max_retries: (\d+))?")
#: What the client's library says where a reply did not come, or not whole.
_LOST = ("HTTP error", "error sending request", "response body")
#: Bodies of replies hold tokens, and what was signed.
_BODY = re.compile(r"<(\?xml|Error)\b.*", re.DOTALL)
_REDIRECT = "redirect without LOCATION"
#: Where a client goes that follows a redirect to another host.
NOWHERE = "127.0.0.1:0"
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
_UNKNOWN = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed")
#: What the client's library says of a connection, and what we say.
_CONNECTIONS = {
    "dns error": "its name is unknown",
    "ConnectionRefused": "it refuses connections",
    "TimedOut": "it takes too long",
    "timed out": "it takes too long",
    "InvalidCertificate": "its certificate is not trusted (SSL_CERT_FILE names a file of authorities)",
}
_LOOK_S = 5.0
#: Of an error of the client, which repeats the reply's body, whatever its length.
_MOST_CHARS = 8192
#: Of what an error of ours repeats.
_SHOWN_CHARS = 500
#: A word that no sentence has: a token, a signature.
_LONG_WORD = re.compile(r"[A-Za-z0-9+/=_-]{32,}")
#: Headers, and parts of signed URLs, that a reply repeats.
_HEADER = re.compile(
    r"(authorization|credential|signature|secret\w{0,20}|[\w-]{0,20}token|x-(?:amz|goog|ms)-[\w-]{1,40})[\"']?\s{0,3}[:=].*",
    re.IGNORECASE | re.DOTALL,
)


def is_too_short(error: BaseException) -> bool:
    """Whether an object ends before the range that was asked for: the store's word, or obstore's where the store says nothing."""
    return _status(_read(error)) == "416" or "Wanted range starting at" in _read(error)


def is_forbidden(error: BaseException) -> bool:
    """Whether a store refused a request, whatever the reason."""
    return _status(_read(error)) == "403"


def has_answered(error: BaseException) -> bool:
    """Whether a store replied to the last try of a request."""
    return _status(_read(error)) is not None


def is_lost(error: BaseException) -> bool:
    """Whether a connection broke before a whole reply came, and the client did not use up its own tries.

    The request may have been carried out.
    """
    text = _read(error)
    if _status(text) is not None or not any(sign in text for sign in _LOST):
        return False
    tried = _RETRIES.search(text)
    return tried is None or tried[2] is None or int(tried[1]) < int(tried[2])


def is_unknown_upload(error: BaseException) -> bool:
    """Whether a store does not know an upload in parts: it was completed, or ended by another."""
    return "NoSuchUpload" in _read(error)


def is_unexplained(error: BaseException) -> bool:
    """Whether a store refused a request in a reply without a body, as every reply to HEAD is."""
    text = _read(error)
    return _status(text) in ("400", "401", "403") and _CODE.search(text) is None


def explained(error: BaseException) -> str:
    """One sentence. May ask the store, without credentials, for the region of a bucket that lies in another one."""
    return scrubbed(_explained(_read(error)))


def _explained(text: str) -> str:
    status, found = _status(text), _CODE.search(text)
    code = found[1] if found else ""
    reply = f"{status} ({code})" if code else f"{status}"
    if any(server in text for server in _METADATA_SERVERS):
        return (
            "no credentials were found: set those of the store in the environment, or "
            "shardwise.configure_storage(url, skip_signature=True) for a public one"
        )
    if f"{NOWHERE}," in text:
        return "the store redirects to another host, which would get the credentials; see the endpoint"
    if "non-partial response" in text:
        return "the store does not serve byte ranges as HTTP says (status 206); copy the files to a local directory"
    region = _REGION.search(text)
    if region or _REDIRECT in text:
        return _wrong_region(region[1] if region else _region_of(text))
    if code == "NoSuchBucket":
        return "no such bucket"
    if code in _EXPIRED:
        return f"the credentials have expired: {reply}; get new ones, and start again"
    if code == "RequestTimeTooSkewed":
        return f"the clock of this machine differs from the store's: {reply}; set it"
    if status == "401" or code in _UNKNOWN:
        return f"the store refused the credentials: {reply}; see the key and its secret"
    if status == "403":
        return f"the store refused it: {reply}; see the credentials and their rights"
    if code == "NoSuchUpload":
        return f"the store has ended the upload: {reply}; see its rule for unfinished uploads, and write it again"
    if status == "404":
        return f"not there: {reply}"
    if status and code:
        said = _MESSAGE.search(text)
        return f"the store refused it: {reply}" + (f": {_LONG_WORD.sub('…', said[1])}" if said else "")
    if status:
        phrase = _PHRASE.search(text)
        return f"the store refused it: {phrase[1] if phrase else status}"
    return _no_reply(text) if "error sending request" in text else _shown(text)


def text_of(error: BaseException) -> str:
    """The first lines of an error, without queries of URLs and bodies of replies: they may hold a token or a signature."""
    return scrubbed(_shown(_read(error)))


def scrubbed(text: str) -> str:
    """A text of a store's client that an error may repeat: cut, without credentials, without characters that a terminal obeys."""
    shown = without_queries(text[:_MOST_CHARS])
    for secret in secrets():
        shown = shown.replace(secret, "…")
    shown = _HEADER.sub(r"\1: …", shown)[:_SHOWN_CHARS]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def _read(error: BaseException) -> str:
    """What the client says, up to a length that no body of a reply extends."""
    return str(error)[:_MOST_CHARS]


def _shown(text: str) -> str:
    first = _BODY.sub("", text.partition("Debug source")[0])
    return " ".join(first.split())


def _status(text: str) -> str | None:
    found = _STATUS.search(text)
    return found[1] if found else None


def _wrong_region(region: str | None) -> str:
    if region is None:
        return "the bucket is in another region: set its own by AWS_REGION or shardwise.configure_storage(url, region=...)"
    return (
        f"the bucket is in region {region}: set AWS_REGION={region}, or "
        f"shardwise.configure_storage(url, region={region!r}); an endpoint that names another region has to go"
    )


def _region_of(text: str) -> str | None:
    """The region that S3 names in a header of each reply, which obstore does not hand out; None if it can't be had."""
    asked = _ASKED.search(text)
    if asked is None:
        return None
    found: list[str] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(asked[1], method="HEAD"), timeout=_LOOK_S
            ) as reply:
                headers = reply.headers
        except urllib.error.HTTPError as error:
            headers = error.headers
        except (OSError, ValueError, http.client.HTTPException):
            return
        found.append(headers.get("x-amz-bucket-region") or "")

    looking = threading.Thread(target=ask, daemon=True)  # a reply may come byte by byte
    looking.start()
    looking.join(_LOOK_S)
    return found[0] if found and re.fullmatch(r"[a-z0-9-]{1,40}", found[0]) else None


def _no_reply(text: str) -> str:
    asked, retries = _ASKED.search(text), _RETRIES.search(text)
    host = asked[2] if asked else "the store"
    tries = f" in {int(retries[1]) + 1} tries" if retries else ""
    why = next((said for sign, said in _CONNECTIONS.items() if sign in text), "the connection failed")
    return f"no reply from {host}{tries}: {why}; see the endpoint, and whether this machine reaches it"


# ----------------------------------------------------------------------------------------------------
# Any other URL, by fsspec: for reading.


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
