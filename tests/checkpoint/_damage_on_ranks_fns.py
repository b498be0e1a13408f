"""What the ranks of test_damage_fallback.py run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shardwise as sw
from tests.checkpoint._checkpointer_fns import state_at
from tests.harness.hostile import edit_documents, edit_manifest


def _old_manifest(root: Path) -> None:
    content = (root / "step-00000001" / "manifest.json").read_bytes()
    (root / "step-00000002" / "manifest.json").write_bytes(content)


def _in_state(root: Path) -> None:
    edit_documents(root / "step-00000002", lambda d: d["optimizer"].update(groups=[3]))


def _on_one_rank(root: Path) -> None:
    edit_documents(root / "step-00000002", lambda d: d.update(rng=[]), "rank/00001")


def _model_named_outside(root: Path) -> None:
    edit_manifest(root / "step-00000002", lambda m: m["models"].update({"../x": {}}))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "contains step 1, but step 2": _old_manifest,
    "optimizer.groups[0]: expected a mapping": _in_state,
    "rng: expected a mapping": _on_one_rank,
    "is not a word": _model_named_outside,
}


def falls_back(root: str) -> list[tuple[int, dict[int, str], str]]:
    """For each damage to step 2: the step that a resume found, what it says of step 2, and the label that came back."""
    found: list[Any] = []
    for k, damage in enumerate(DAMAGE.values()):
        own = Path(root, str(k))
        with sw.Checkpointer(own) as checkpoints:
            for step in (1, 2):
                checkpoints.save(state_at(step), step)
        if dist.get_rank() == 0:
            damage(own)
        dist.barrier()
        live = state_at(0)
        with sw.Checkpointer(own) as checkpoints:
            report = checkpoints.resume(live)
        assert report is not None
        found.append((report.step, dict(report.damaged), live.extra["label"]))
    return found
