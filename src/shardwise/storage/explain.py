"""What an error of obstore means: one sentence that says what to do, without what may be a credential."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request

from .urls import without_queries

__all__ = [
    "explained",
    "has_answered",
    "is_forbidden",
    "is_lost",
    "is_too_short",
    "is_unexplained",
    "is_unknown_upload",
    "text_of",
]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,40})</Region>")
_ASKED = re.compile(r"Error performing [A-Z]+ ((https?://[^\s/?]+)[^\s?]*)")
_RETRIES = re.compile(r"after (\d+) retries(?:, max_retries: (\d+))?")
#: What the client's library says where a reply did not come, or not whole.
_LOST = ("HTTP error", "error sending request", "response body", "Got invalid list", "Got invalid multipart")
#: Bodies of replies hold tokens, and what was signed.
_BODY = re.compile(r"<(\?xml|Error)\b.*", re.DOTALL)
_REDIRECT = "redirect without LOCATION"
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


def is_too_short(error: BaseException) -> bool:
    """Whether an object ends before the range that was asked for: the store's word, or obstore's where the store says nothing."""
    return _status(str(error)) == "416" or "Wanted range starting at" in str(error)


def is_forbidden(error: BaseException) -> bool:
    """Whether a store refused a request, whatever the reason."""
    return _status(str(error)) == "403"


def has_answered(error: BaseException) -> bool:
    """Whether a store replied to the last try of a request."""
    return _status(str(error)) is not None


def is_lost(error: BaseException) -> bool:
    """Whether a connection broke before a whole reply came, and the client did not use up its own tries.

    The request may have been carried out.
    """
    text = str(error)
    if _status(text) is not None or not any(sign in text for sign in _LOST):
        return False
    tried = _RETRIES.search(text)
    return tried is None or tried[2] is None or int(tried[1]) < int(tried[2])


def is_unknown_upload(error: BaseException) -> bool:
    """Whether a store does not know an upload in parts: it was completed, or ended by another."""
    return "NoSuchUpload" in str(error)


def is_unexplained(error: BaseException) -> bool:
    """Whether a store refused a request in a reply without a body, as every reply to HEAD is."""
    text = str(error)
    return _status(text) in ("400", "401", "403") and _CODE.search(text) is None


def explained(error: BaseException) -> str:
    """One sentence. May ask the store, without credentials, for the region of a bucket that lies in another one."""
    text = str(error)
    status, found = _status(text), _CODE.search(text)
    code = found[1] if found else ""
    reply = f"{status} ({code})" if code else f"{status}"
    if any(server in text for server in _METADATA_SERVERS):
        return (
            "no credentials were found: set those of the store in the environment, or "
            "shardwise.storage_options(url, skip_signature=True) for a public one"
        )
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
    if status == "404":
        return f"not there: {reply}"
    if status and code:
        said = _MESSAGE.search(text)
        return without_queries(f"the store refused it: {reply}" + (f": {said[1]}" if said else ""))
    return _no_reply(text) if "error sending request" in text else text_of(error)


def text_of(error: BaseException) -> str:
    """The first lines of an error, without queries of URLs and bodies of replies: they may hold a token or a signature."""
    first = _BODY.sub("", str(error).partition("Debug source")[0])
    return without_queries(" ".join(first.split()))[:500]


def _status(text: str) -> str | None:
    found = _STATUS.search(text)
    return found[1] if found else None


def _wrong_region(region: str | None) -> str:
    if region is None:
        return "the bucket lies in another region: set its own by AWS_REGION or shardwise.storage_options(url, region=...)"
    return (
        f"the bucket lies in region {region}: set AWS_REGION={region}, or "
        f"shardwise.storage_options(url, region={region!r}); an endpoint that names another region has to go"
    )


def _region_of(text: str) -> str | None:
    """The region that S3 names in a header of each reply, which obstore does not hand out; None if it can't be had."""
    asked = _ASKED.search(text)
    if asked is None:
        return None
    try:
        with urllib.request.urlopen(
            urllib.request.Request(asked[1], method="HEAD"), timeout=_LOOK_S
        ) as reply:
            headers = reply.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except (OSError, ValueError, http.client.HTTPException):
        return None
    found = headers.get("x-amz-bucket-region") or ""
    return found if re.fullmatch(r"[a-z0-9-]{1,40}", found) else None


def _no_reply(text: str) -> str:
    asked, retries = _ASKED.search(text), _RETRIES.search(text)
    host = asked[2] if asked else "the store"
    tries = f" in {int(retries[1]) + 1} tries" if retries else ""
    why = next((said for sign, said in _CONNECTIONS.items() if sign in text), "the connection failed")
    return f"no reply from {host}{tries}: {why}; see the endpoint, and whether this machine reaches it"
