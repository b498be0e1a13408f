"""The page for people who come from Lightning, whose package is not among those of the other pages' tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT


@pytest.mark.slow
def test_lightning() -> None:
    """All its blocks, with a Trainer and with Fabric, and checkpoints as a Trainer writes them."""
    pytest.importorskip("lightning")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs._run_blocks", "docs/migrate/lightning.md"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert done.stdout.count("docs/migrate/lightning.md:") == 4
