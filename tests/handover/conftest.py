"""Models that are handed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import models


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "qwen3-moe", "qwen3-tied", "mixtral"):
        models.write_hub_directory(kind, found / kind, torch.float32)
    return found
