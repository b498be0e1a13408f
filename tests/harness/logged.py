"""What the package logs while something runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["warnings_logged"]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What the package warns of by logging."""
    handler, logger = _Records(), logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
