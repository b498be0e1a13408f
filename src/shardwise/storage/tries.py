"""How often, and for how long, a call to a store is made again where its connection broke."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Tries", "again"]

T = TypeVar("T")

#: So often a call is made again. The store's client has tried several times before, where it could.
_RETRIES = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
#: A call that began so long ago is not made again.
_LONGEST_S = 60.0


class Tries:
    """The tries of one call."""

    def __init__(self) -> None:
        self.failed = 0
        self._pause_s = _PAUSE_S
        self._until_s = time.monotonic() + _LONGEST_S

    def another(self) -> bool:
        """Count a failure. Whether the call may be made again; then it waits before it returns."""
        self.failed += 1
        if self.failed > _RETRIES or time.monotonic() > self._until_s:
            return False
        time.sleep(self._pause_s * random.Random(os.urandom(8)).uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return True


def again(call: Callable[[], T], is_lost: Callable[[Exception], bool]) -> T:
    """Make a call, and make it again after each error that ``is_lost`` takes for a broken connection. Raises the last one.

    For calls that may be carried out twice.
    """
    tries = Tries()
    while True:
        try:
            return call()
        except Exception as error:
            if not (is_lost(error) and tries.another()):
                raise
