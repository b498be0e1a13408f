"""Importing and using the integrations changes nothing in accelerate, peft, torch, transformers and trl."""

from __future__ import annotations

from pathlib import Path

from tests.dist import _patching_fns as fns
from tests.harness.launch import Launch
from tests.models import build_reference


def test_no_attribute_changes(tmp_path: Path) -> None:
    build_reference("qwen3-tied").save_pretrained(tmp_path / "hub")
    with Launch(1, fns.patched, str(tmp_path / "hub"), str(tmp_path)) as process:
        process.wait(150)
        found = process.result(0)
    assert found["looked at"] > 5_000
    assert not found["changes"], "\n".join(found["changes"])
    assert len(found["patched on purpose"]) == 1
