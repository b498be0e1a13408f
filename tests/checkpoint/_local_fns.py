"""What the ranks run in the tests of ``Checkpointer(local=True)``. ``places[rank]`` is the number of the rank's host."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.publish.lock import DirectoryLock
from tests.checkpoint._checkpointer_fns import failure

IO = sw.IOOptions(timeout_s=30)


class Net(nn.Module):
    """Sharded layers, a plain parameter and a buffer: what is the same on all ranks is stored by one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 21), nn.Dropout(0.2), nn.Linear(21, 3)
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.down(self.drop(self.up(x).relu())) * self.scale.sum()


def build(replicas: int = 1) -> sw.TrainState:
    torch.manual_seed(0)
    model, world = Net(), dist.get_world_size()
    shape = (replicas, world // replicas) if replicas > 1 else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return sw.TrainState(model=model, optimizer=optimizer, extra={"tokens": torch.arange(7)})


def train(state: sw.TrainState, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        loss = state.model(torch.rand(4, 8)).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def root(hosts: str, places: Sequence[int]) -> str:
    return os.path.join(hosts, f"host-{places[dist.get_rank()]}", "run")


def digest(state: sw.TrainState) -> str:
    return f"{sw.digest(state.model)}"


def whole_way(hosts: str, places: Sequence[int], mode: str, replicas: int = 1) -> dict[str, Any]:
    """Train 3 steps, save, train 3; resume anew, train 3."""
    at = root(hosts, places)
    state = build(replicas)
    with sw.Checkpointer(at, local=True, mode=mode, io=IO) as checkpoints:  # type: ignore[arg-type]
        assert checkpoints.resume(state) is None
        train(state, 3)
        checkpoints.save(state, 3)
        saved = digest(state)
        after = train(state, 3)
    state = build(replicas)
    with sw.Checkpointer(at, local=True, mode=mode, io=IO) as checkpoints:  # type: ignore[arg-type]
        report = checkpoints.resume(state)
        assert report is not None
        found = digest(state)
        again = train(state, 3)
    return {"same": after == again and saved == found, "exact": report.exact, "path": report.path}


def save_steps(
    hosts: str, places: Sequence[int], last: int, keep_last: int | None, local: bool = True
) -> dict[int, str]:
    """Save steps 1 to ``last``; the digest of each."""
    state, digests = build(), {}
    with sw.Checkpointer(root(hosts, places), local=local, keep_last=keep_last, io=IO) as checkpoints:
        for step in range(1, last + 1):
            train(state, 1)
            checkpoints.save(state, step)
            digests[step] = digest(state)
    return digests


def resume_each(cases: Sequence[tuple[str, Sequence[int], bool]]) -> list[Any]:
    """For each hosts and places, local or not: the resumed step, the digest and the exactness; or the error."""
    found: list[Any] = []
    for hosts, places, local in cases:
        state = build()
        try:
            with sw.Checkpointer(root(hosts, places), local=local, io=IO) as checkpoints:
                report = checkpoints.resume(state)
                assert report is not None
                found.append((report.step, digest(state), report.exact))
                checkpoints.save(state, report.step + 10)
        except sw.errors.ShardwiseError as error:
            found.append((type(error).__name__, str(error)))
    return found


def failing_saves(hosts: str, places: Sequence[int]) -> list[tuple[str, str]]:
    """A save that one host can't write, then one that it can; and a directory that another run holds."""
    at, state, found = root(hosts, places), build(), []
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with sw.Checkpointer(at, local=True, io=IO) as checkpoints:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if is_last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        found.append(failure(lambda: checkpoints.save(state, 1)))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [n for n in os.listdir(at) if n.startswith((".tmp", "step"))] == []
        dist.barrier()
        checkpoints.save(state, 1)
    lock = DirectoryLock(at) if is_last else None
    dist.barrier()
    found.append(failure(lambda: sw.Checkpointer(at, local=True, io=IO)))
    if lock is not None:
        lock.release()
    dist.barrier()
    return found


def restored(path: str) -> str:
    """The digest after an ordinary restore of one directory."""
    state = build()
    sw.restore(state, path)
    return digest(state)


def keep_two(hosts: str, places: Sequence[int]) -> list[str]:
    """Save steps 1 to 3, lose a file of step 3 on the last host, save step 4; the steps that are left here."""
    at, state = root(hosts, places), build()
    with sw.Checkpointer(at, local=True, keep_last=2, io=IO) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state, step)
        if dist.get_rank() == dist.get_world_size() - 1:
            next(Path(at).glob("step-00000003/model/shard-*")).unlink()
        dist.barrier()
        checkpoints.save(state, 4)
    return sorted(n for n in os.listdir(at) if n.startswith("step-"))


def failing_seal(hosts: str, places: Sequence[int]) -> tuple[tuple[str, str], list[str]]:
    """A save whose last step fails on the last host: it may write every file but the manifest, which is the largest."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    # Its packed states take more text in the manifest than bytes in a file.
    optimizer = torch.optim.Adagrad(model.parameters())
    state, at = sw.TrainState(model=model, optimizer=optimizer), root(hosts, places)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with sw.Checkpointer(at, local=True, io=IO) as checkpoints:
        checkpoints.save(state, 1)
        sizes = sorted((p.stat().st_size, p.name) for p in Path(at).glob("step-00000001/**/*") if p.is_file())
        assert sizes[-1][1] == "manifest.json", sizes
        if dist.get_rank() == dist.get_world_size() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-2][0], limits[1]))
        found = failure(lambda: checkpoints.save(state, 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return found, sorted(n for n in os.listdir(at) if n.startswith(("step-", ".tmp")))


def half_published(hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """A first save whose last part does not get its name; then a start that resumes."""
    state, at = build(), root(hosts, places)
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and os.path.basename(target).startswith("step-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        rename(source, target)

    with sw.Checkpointer(at, local=True, io=IO) as checkpoints:
        train(state, 1)
        os.rename = failing
        try:
            error = failure(lambda: checkpoints.save(state, 1))
        finally:
            os.rename = rename
    dist.barrier()
    left = [n.rpartition("-")[0] for n in os.listdir(at) if n.startswith((".tmp", "step-"))]
    dist.barrier()
    saved, state = digest(state), build()
    with sw.Checkpointer(at, local=True, io=IO) as checkpoints:
        report = checkpoints.resume(state)
    there = [n for n in os.listdir(at) if n.startswith((".tmp", "step-"))]
    step = None if report is None else report.step
    return {"error": error, "left": left, "resumed": step, "same": saved == digest(state), "there": there}
