"""What the ranks run in the tests of going on: the same run past its save, and a restored copy of it, step by step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from shardwise.names import named_tensors
from tests.checkpoint._resume_fns import WIDTH, Net, Noisy, assert_same_bits, bits, build, draws, scramble

STEPS = 20


# ------------------------------------------------------------------------------------------------- loaders


class Clean(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are what they are, whoever reads them."""

    def __len__(self) -> int:
        return 34

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.linspace(-1, 1, WIDTH) * (index / 34), index


def replayed(workers: int) -> Any:
    return sw.ResumableLoader(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers))


def elastic(workers: int) -> Any:
    data = Clean() if workers else Noisy()
    sampler = sw.ElasticSampler(data, global_batch_size=4 * dist.get_world_size(), seed=2)
    return sw.ResumableLoader(DataLoader(data, batch_sampler=sampler, num_workers=workers))


def stateful(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Clean() if workers else Noisy()
    with warnings.catch_warnings():  # torchdata 0.11 sets a "vital" of torch
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers)


LOADERS: dict[str, Callable[[int], Any]] = {"replayed": replayed, "elastic": elastic, "stateful": stateful}


# ---------------------------------------------------------------------------------------- continue, resume


@dataclass(frozen=True)
class Recipe:
    """A run. ``accumulate`` is in batches per step; the save comes after ``saved_after`` batches."""

    optimizer: str
    loader: str = "replayed"
    workers: int = 0
    scaled: bool = False
    accumulate: int = 1
    saved_after: int = 5
    mode: str = "sync"

    @property
    def in_cycle(self) -> bool:
        """Whether gradients wait for a step when it is saved."""
        return self.saved_after % self.accumulate != 0


class Trainer:
    """The loop: a log entry per batch with all that must be the same."""

    def __init__(self, recipe: Recipe, *, seed: int) -> None:
        self.recipe = recipe
        self.state = build(recipe.optimizer, seed=seed)
        self.state.dataloader = LOADERS[recipe.loader](recipe.workers)
        if recipe.scaled:
            self.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
        self.done = 0

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.state.dataloader

    def train(self, batches: Iterator[Any], count: int) -> list[dict[str, Any]]:
        return [self._batch(*next(batches)) for _ in range(count)]

    def _batch(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
        state, optimizer, scaler = self.state, self.state.optimizer, self.state.scaler
        assert isinstance(optimizer, torch.optim.Optimizer)
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.recipe.scaled):
            logits = state.model(x)  # type: ignore[operator]
        loss = nn.functional.cross_entropy(logits.float(), ids % 3)
        (loss if scaler is None else scaler.scale(loss)).backward()
        self.done += 1
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if self.done % self.recipe.accumulate == 0:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            state.scheduler.step()
        return {
            "ids": ids.tolist(),
            "x": x.sum().item(),
            "lr": rates,
            "loss": loss.item(),
            "scale": scaler and (scaler.get_scale(), scaler._get_growth_tracker()),
            "rng": draws(),
            "tensors": hashes(state),
        }


def hashes(state: sw.TrainState) -> dict[str, str]:
    """Of this rank's part of every parameter, buffer, optimizer tensor and gradient."""
    found = {name: tensor for name, (_, tensor) in bits(state).items()}
    for t in named_tensors(state.model):  # type: ignore[arg-type]
        if t.tensor.grad is not None:
            found[f"gradient {t.name}"] = local(t.tensor.grad)
    return {n: xxhash.xxh3_64_hexdigest(t.contiguous().view(-1).numpy()) for n, t in found.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def continued_equals_resumed(root: str, recipe: Recipe) -> dict[str, Any]:
    """Saved in the middle of an epoch (and of a cycle); the next 20 steps go through the end of epochs."""
    scramble(11)
    first = Trainer(recipe, seed=1)
    batches = first.batches()
    begun = first.train(batches, recipe.saved_after)
    count = STEPS * recipe.accumulate
    with sw.Checkpointer(root, mode=recipe.mode) as checkpoints:  # type: ignore[arg-type]
        saved = checkpoints.save(first.state, recipe.saved_after)
        expected = first.train(batches, count)  # with "async": while the save goes on behind
    last = bits(first.state)
    del batches

    scramble(12)
    second = Trainer(recipe, seed=4)
    other = second.batches()
    second.train(other, 3)  # gradients, optimizer state and position of its own, which must not shine through
    del other
    second.state.dataloader = LOADERS[recipe.loader](recipe.workers)
    scramble(13)
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(second.state)
    assert report is not None
    second.done = recipe.saved_after
    found = second.train(second.batches(), count)
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        for key in b:
            assert a[key] == b[key], (index, key, a[key], b[key])
    assert_same_bits(bits(second.state), last)
    assert not report.differences
    assert report.exact is (not report.caveats)
    return {
        "ids": [entry["ids"] for entry in begun + expected],
        "scales": [entry["scale"] for entry in begun + expected],
        "losses": [entry["loss"] for entry in expected],
        "gradients": (saved.gradients, report.gradients),
        "caveats": report.caveats,
        "tensors": len(expected[-1]["tensors"]),
    }


# -------------------------------------------------------------------------------------- other world sizes

GLOBAL_BATCH = 12
ACCUMULATE = 3
SAMPLES = 50  # a fifth global batch, which fills up with the first samples


class Samples(Clean):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(WIDTH) * (index + 1.0)), index


def stage(root: str, batches: int, workers: int) -> dict[str, Any]:
    """Go on for some global batches, wherever in a cycle or an epoch the run is, and save.

    No dropout: the sums of gradients are the same at every world size, but for their order.
    """
    scramble(dist.get_world_size())
    state = build("adamw", seed=1)
    state.model.eval()  # type: ignore[union-attr]
    data = Samples()
    sampler = sw.ElasticSampler(data, global_batch_size=GLOBAL_BATCH, seed=4)
    loader = state.dataloader = sw.ResumableLoader(
        DataLoader(data, batch_sampler=sampler, num_workers=workers)
    )
    state.extra = {"done": 0}
    taken = []
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(state)
        resumed = hashes(state)
        while len(taken) < batches:
            for x, ids in loader:
                loss = nn.functional.cross_entropy(state.model(x), ids % 3)  # type: ignore[operator]
                (loss / ACCUMULATE).backward()
                state.extra["done"] += 1
                if state.extra["done"] % ACCUMULATE == 0:
                    state.optimizer.step()  # type: ignore[union-attr]
                    state.optimizer.zero_grad()  # type: ignore[union-attr]
                    state.scheduler.step()
                taken.append((loader.epoch, ids.tolist()))
                if len(taken) == batches:
                    break
        saved = checkpoints.save(state, state.extra["done"])
    full = {n: p.full_tensor() for n, p in state.model.named_parameters()}  # type: ignore[union-attr]
    return {
        "taken": taken,
        "resumed": resumed,
        "hashes": hashes(state),
        "full": full,
        "gradients": (report.gradients if report else 0, saved.gradients),
        "local": [
            n for n in os.listdir(os.path.join(saved.path, "rank")) if "dataloader" in read(saved.path, n)
        ],
    }


def read(path: str, name: str) -> str:
    with open(os.path.join(path, "rank", name), encoding="utf-8", errors="replace") as file:
        return file.read()


# ----------------------------------------------------------------------------- what is not reduced, wrappers


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unreduced(root: str) -> dict[str, Any]:
    """Gradients that FSDP2 holds by itself, of FSDP and of HSDP; and what of them can be stored later."""
    found: dict[str, Any] = {}
    for kind, shape, setting in (
        ("FSDP", (2,), "set_requires_gradient_sync"),
        ("HSDP", (2, 1), "set_requires_all_reduce"),
    ):
        model = Net()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        sw.shard(model, mesh)
        state = sw.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(3, WIDTH)
        sw.save(state, os.path.join(root, kind, "before"))  # nothing ran yet
        getattr(model, setting)(False)
        model(x).sum().backward()
        found[f"{kind} save"] = raised(
            lambda state=state, kind=kind: sw.save(state, os.path.join(root, kind, "no"))
        )  # type: ignore[misc]
        found[f"{kind} restore"] = raised(
            lambda state=state, kind=kind: sw.restore(state, os.path.join(root, kind, "before"))  # type: ignore[misc]
        )
        found[f"{kind} without optimizer"] = raised(
            lambda model=model, kind=kind: sw.save(
                sw.TrainState(model=model), os.path.join(root, kind, "yes")
            )  # type: ignore[misc]
        )
        getattr(model, setting)(True)
        model(x).sum().backward()
        found[f"{kind} reduced"] = sw.save(state, os.path.join(root, kind, "reduced")).gradients
        state.optimizer.step()  # type: ignore[union-attr]
        found[f"{kind} used"] = sw.save(state, os.path.join(root, kind, "used")).gradients
        model(x).sum().backward()  # onto what the step used
        found[f"{kind} onto used"] = sw.save(state, os.path.join(root, kind, "onto used")).gradients
    return found


def not_synced_by_ddp(root: str) -> str:
    """Under ``no_sync`` every rank has gradients of its own."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    state = sw.TrainState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with model.no_sync():
        model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    return raised(lambda: sw.save(state, root))


def accelerated(root: str) -> list[int]:
    """Accelerate's wrapper steps the optimizer inside of it: that one is watched."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        state = sw.TrainState(model=model, optimizer=optimizer)
        found = []
        for step in range(1, 5):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(torch.ones(1, 3)).sum())
                optimizer.step()
            found.append(sw.save(state, os.path.join(root, str(step))).gradients)
        return found
    finally:
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()
