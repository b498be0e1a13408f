"""What the ranks of test_accelerate_folders.py run: where checkpoints go, and which ones are taken up."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardwise.errors import ShardwiseError
from shardwise.integrations import accelerate as swa
from tests.integrations._accelerate_fns import accelerator_with, whole

LINES = {"transformer_cls_names_to_wrap": ["Linear"]}


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _prepared(accelerator: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    swa.shard(accelerator, model)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(list(range(8)), batch_size=2, shuffle=True)
    model, optimizer, loader = swa.prepare(accelerator, model, optimizer, loader)
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model


def folders(root: str) -> dict[str, Any]:
    """Saves into folders that are taken, with and without automatic naming."""
    from accelerate.utils import ProjectConfiguration

    found = {}
    with accelerator_with(plugin=LINES) as accelerator:
        _prepared(accelerator)
        found["nowhere"] = _error_of(lambda: swa.save_state(accelerator))
        swa.save_state(accelerator, f"{root}/latest")
        before = os.stat(f"{root}/latest/manifest.json").st_mtime_ns
        found["taken"] = _error_of(lambda: swa.save_state(accelerator, f"{root}/latest"))
        found["kept"] = os.stat(f"{root}/latest/manifest.json").st_mtime_ns == before
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
    with accelerator_with(plugin=LINES, project_config=project) as accelerator:
        _prepared(accelerator)
        found["path"] = swa.save_state(accelerator, f"{root}/ignored").path
        accelerator.project_configuration.iteration = 0
        found["counted anew"] = _error_of(lambda: swa.save_state(accelerator))
        accelerator._optimizers[0].param_groups[0]["lr"] = 0.5
        report = swa.load_state(accelerator)
        found["exact"], found["replaced"] = report.exact, report.replaced
        found["next"] = swa.save_state(accelerator).path
    return found


def of_accelerate(root: str) -> dict[str, Any]:
    """Accelerate's own checkpoint of a script with a data loader, taken up."""
    with accelerator_with(plugin=LINES) as accelerator:
        model = _prepared(accelerator)
        accelerator.save_state(root)
        saved = whole(model)
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        accelerator._optimizers[0].step()
        changed = whole(model)
        accelerator._optimizers[0].param_groups[0]["lr"] = 0.5
        report = swa.load_state(accelerator, root)
        return {
            "replaced": report.replaced,
            "saved by": report.saved_world_size,
            "changed": any(not torch.equal(saved[name], t) for name, t in changed.items()),
            "same": all(torch.equal(saved[name], t) for name, t in whole(model).items()),
            "exact": report.exact,
            "skipped": report.skipped,
        }
