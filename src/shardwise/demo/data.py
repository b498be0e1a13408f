"""Text pairs from the installed standard library, and batches of them that any number of ranks can share."""

from __future__ import annotations

import ast
import os
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SourceError, StateError

__all__ = ["PairBatches", "docstring_pairs", "split"]

Pair = tuple[str, str]

_SKIPPED = frozenset({"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests"})
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_FIRST_CHARS, _REST_CHARS = 20, 40  # shorter texts are too hard to match
_CUT_CHARS = 150


def docstring_pairs(count: int, *, seed: int = 0) -> list[Pair]:
    """First line and rest of docstrings of the standard library; the same list for the same Python.

    Parses the sources and never imports them. Files come in an order drawn from ``seed``, no line twice. Raises
    :class:`SourceError` if there are fewer than ``count``, for example if only bytecode is installed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_sources(root))
    random.Random(seed).shuffle(files)
    pairs: list[Pair] = []
    seen: set[str] = set()
    for file in files:
        for first, rest in _pairs_of(root / file):
            if first not in seen and rest not in seen:
                seen |= {first, rest}
                pairs.append((first, rest))
                if len(pairs) == count:
                    return pairs
    raise SourceError(f"holds {len(pairs)} usable docstrings, but the demo needs {count}", path=str(root))


def _sources(root: Path) -> Iterator[Path]:
    """Python files below a directory, as paths in it, but for those in skipped directories."""
    for directory, directories, names in os.walk(root):
        directories[:] = [name for name in directories if name not in _SKIPPED]
        yield from ((Path(directory) / name).relative_to(root) for name in names if name.endswith(".py"))


def _pairs_of(file: Path) -> Iterator[Pair]:
    try:
        with warnings.catch_warnings():  # ignore warnings about escapes in the library's own sources
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        first, _, rest = (text or "").partition("\n")
        rest = " ".join(rest.split())
        if len(first) >= _FIRST_CHARS and len(rest) >= _REST_CHARS:
            yield first[:_CUT_CHARS], rest[:_CUT_CHARS]


def split(pairs: list[Pair], held_out: int, *, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and ``held_out`` pairs that training never sees."""
    shuffled = list(pairs)
    random.Random(seed).shuffle(shuffled)
    return shuffled[held_out:], shuffled[:held_out]


class PairBatches:
    """This rank's part of one global sequence of batches.

    The sequence depends only on seed, epoch and batch size; ranks take equal slices of each batch. So the position is
    the same on every rank, and a run that goes on with more or fewer ranks skips and repeats nothing. An epoch ends
    when no full batch is left.
    """

    def __init__(
        self, pairs: list[Pair], batch_size: int, *, rank: int, world_size: int, seed: int = 0
    ) -> None:
        if batch_size % world_size:
            raise ValueError(f"a batch of {batch_size} can't be divided among {world_size} ranks")
        if len(pairs) < batch_size:
            raise ValueError(f"{len(pairs)} pairs are fewer than one batch of {batch_size}")
        self._pairs = pairs
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._epoch = 0
        self._consumed = 0

    def take(self) -> list[Pair]:
        """This rank's slice of the next batch."""
        if (self._consumed + 1) * self._batch_size > len(self._pairs):
            self._epoch, self._consumed = self._epoch + 1, 0
        order = list(range(len(self._pairs)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        share = self._batch_size // self._world_size
        begin = self._consumed * self._batch_size + self._rank * share
        self._consumed += 1
        return [self._pairs[i] for i in order[begin : begin + share]]

    def state_dict(self) -> dict[str, Any]:
        """The position and a description of its sequence. Equal on all ranks."""
        return {**self._sequence(), "epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position. Raises :class:`StateError` if it belongs to another sequence."""
        stored = {key: state.get(key) for key in self._sequence()}
        if stored != self._sequence():
            raise StateError(
                f"the data position belongs to {stored}, but these batches are {self._sequence()}"
            )
        self._epoch, self._consumed = state["epoch"], state["consumed"]

    def _sequence(self) -> dict[str, int]:
        return {"pairs": len(self._pairs), "batch_size": self._batch_size, "seed": self._seed}
