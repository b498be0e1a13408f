"""Importing and using the integrations changes no class and no module of accelerate, peft, torch, transformers and trl.

What is changed in objects of a run: docs/concepts/patching.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.launch import Launch
from tests.harness.models import build_reference
from tests.integrations import _nothing_is_patched_fns as fns


@pytest.mark.slow
@pytest.mark.needs("trainer")
def test_no_attribute_changes(tmp_path: Path) -> None:
    build_reference("qwen3-tied").save_pretrained(tmp_path / "hub")
    with Launch(2, fns.patched, str(tmp_path / "hub"), str(tmp_path), fresh=True) as launch:
        launch.wait(250)
        results = [launch.result(rank) for rank in range(2)]
    for found in results:
        assert found["looked at"] > 5_000
        assert not found["changes"], "\n".join(found["changes"])
        assert len(found["patched on purpose"]) == 2
