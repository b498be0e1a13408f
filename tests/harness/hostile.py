"""Changing a stored checkpoint as an author would who can count: every checksum is right again afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import shardwise as sw

__all__ = ["Counting", "edit_documents", "edit_manifest", "put_file", "run"]


class Counting(nn.Module):
    """A layer, a buffer, and state beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def run(seed: int = 0) -> sw.TrainState:
    """A training run with a document of almost every kind, after one step."""
    torch.manual_seed(seed)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    loader = sw.ResumableLoader(DataLoader(list(range(8)), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    next(iter(loader))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    extra = {"label": seed, "ints": {1, 2, 3}}
    scheduler = StepLR(optimizer, 3)
    return sw.TrainState(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, dataloader=loader, extra=extra
    )


def edit_manifest(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` do to the manifest of a step what it likes."""
    file = step / "manifest.json"
    document = json.loads(file.read_text())
    del document["xxh3"]
    change(document)
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    file.write_text(json.dumps({**document, "xxh3": xxhash.xxh3_64_hexdigest(text.encode())}))


def put_file(step: Path, name: str, content: bytes) -> None:
    """A small file of a step, new or changed, and its entry in the manifest."""
    (step / name).write_bytes(content)
    entry = {
        "nbytes": len(content),
        "header_bytes": len(content),
        "header_xxh3": xxhash.xxh3_64_hexdigest(content),
    }
    edit_manifest(step, lambda manifest: manifest["files"].update({name: entry}))


def edit_documents(step: Path, change: Callable[[dict[str, Any]], object], stem: str = "state") -> None:
    """Let ``change`` do to the documents of all ranks (or of one) what it likes."""
    documents = json.loads((step / f"{stem}.json").read_text())
    change(documents)
    put_file(step, f"{stem}.json", json.dumps(documents).encode())
