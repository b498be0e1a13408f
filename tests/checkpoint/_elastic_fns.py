"""What the rank of test_elastic.py runs: the example without interruption."""

from __future__ import annotations

from pathlib import Path

from examples import elastic


def uninterrupted(out: str, steps: int) -> None:
    """The example's whole training on this rank alone, without pauses."""
    path = Path(out)
    path.mkdir()
    elastic.train(path, path / "checkpoints", steps, save_every=steps, step_seconds=0.0)
