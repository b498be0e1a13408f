"""Checkpoints that libraries wrote, each once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.quantized.compressed_cases import Checkpoint, checkpoint


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """The checkpoint of a case of :mod:`tests.quantized.compressed_cases`, by its name."""
    return cache(lambda case: checkpoint(tmp_path_factory.mktemp(case), case))
