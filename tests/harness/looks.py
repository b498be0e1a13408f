"""Counting how often a call looks at a model, and how often its ranks agree, without putting anything in its way."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from shardwise import names
from shardwise.format import slices
from shardwise.ranks.protocol import Agreement
from shardwise.tensors import live as layout

__all__ = ["Looks", "looks"]

#: What names the tensors of a model's tree. (Before there was a description of a model, ``named_tensors`` did.)
_WALK: Any = getattr(names, "tensors_of", names.named_tensors)


@dataclass
class Looks:
    """What was counted."""

    walks: int = 0
    """How often tensors of a whole module tree were named, of any module."""
    geometries: int = 0
    """How often it was worked out how a model's tensors are spread."""
    files: int = 0
    """How often the slice files of a rank were worked out for one part of a state."""
    rounds: Counter[str] = field(default_factory=Counter)
    """Rounds of agreement, by label. There are none with one rank."""

    def as_json(self) -> dict[str, Any]:
        return {"walks": self.walks, "geometries": self.geometries, "rounds": self.rounds.total()}


@contextmanager
def looks() -> Iterator[Looks]:
    """Count in this thread, while in the block. Everything that Python calls meanwhile is slower."""
    found = Looks()

    def walk(_: FrameType) -> None:
        found.walks += 1

    def geometries(_: FrameType) -> None:
        found.geometries += 1

    def files(_: FrameType) -> None:
        found.files += 1

    def agreed(frame: FrameType) -> None:
        found.rounds[frame.f_locals["request"].label] += 1

    counted: dict[CodeType, Callable[[FrameType], None]] = {
        _WALK.__code__: walk,
        layout.geometries_of.__code__: geometries,
        inspect.unwrap(slices.rank_files).__code__: files,
        Agreement.agree.__code__: agreed,
    }

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (count := counted.get(frame.f_code)) is not None:
            count(frame)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(before)
