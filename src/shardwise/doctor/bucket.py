"""A short probe of a prefix in an object store: a few small objects, which it deletes."""

from __future__ import annotations

import json
import secrets
import time

from ..errors import ShardwiseError
from ..storage import join, place_of, store_of
from .facts import Bucket

__all__ = ["look_at_bucket"]


def look_at_bucket(url: str) -> Bucket:
    """Facts of the prefix ``url``. Rank-local; takes about ten requests.

    Asks for what a run needs: list, write, write only if absent, replace only if unchanged, delete.
    """
    failures: dict[str, str] = {}
    ahead_s = 0.0
    step = "list"
    try:
        place = place_of(join(url, f".shardwise-doctor-{secrets.token_hex(8)}"))
        store = store_of(place.root)
        store.list(place.key)
        step, plain, key = "write", f"{place.key}/plain", f"{place.key}/one"
        first, second = (_content(k) for k in range(2))
        store.write(plain, iter([memoryview(first)]), len(first))
        step = "create"
        if not store.create(key, first):
            failures["create"] = "a write to a fresh name was refused as if it were taken"
        stat = store.stat(key)
        if stat is not None and stat.changed_s is not None:
            found_s = stat.changed_s - time.time()
            ahead_s = 0.0 if -2.0 <= found_s <= 0.0 else found_s  # stores say whole seconds
        if store.create(key, second):
            failures["create"] = "a second write under 'only if absent' replaced the first"
        step = "replace"
        held = store.get(key, 4096)
        if held is not None:
            third = _content(3)
            if not store.replace(key, third, held):
                failures["replace"] = "'only if unchanged' was refused though nothing had changed"
            elif store.replace(key, _content(4), held):
                failures["replace"] = "'only if unchanged' replaced an object that had changed"
    except (ShardwiseError, OSError) as error:
        failures[step] = str(error)
    if step not in ("list", "write"):
        try:
            for name in (plain, key):
                store.delete(name)
                if store.stat(name) is not None:
                    failures["delete"] = "the object is still there"
        except (ShardwiseError, OSError) as error:
            failures["delete"] = str(error)
    return Bucket(url=url, failures=failures, clock_ahead_s=ahead_s)


def _content(number: int) -> bytes:
    """Unlike that of any other writer."""
    return json.dumps({"probe": number, "nonce": secrets.token_hex(8)}).encode()
