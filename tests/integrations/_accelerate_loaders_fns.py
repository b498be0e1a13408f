"""What the ranks of test_accelerate_loaders.py run: two lives of scripts over Accelerate's own loaders."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from shardwise.errors import StateError
from shardwise.integrations import accelerate as swa
from shardwise.integrations._loaders import LoaderPositions
from shardwise.integrations.accelerate import ShardwiseAccelerator
from tests.integrations._accelerate_fns import accelerator_with

#: 22 samples in batches of 2 on two ranks: 6 steps an epoch, the last of them filled up.
SAMPLES, PER_RANK, STEPS = 22, 2, 6
EPOCHS = 3


@dataclass(frozen=True, slots=True)
class Script:
    """How a script's loader is configured, and where it saves: after a batch of epoch 1, or between two epochs."""

    stateful: bool
    seedable: bool
    save_after: int | None
    shuffle: bool = True
    own_generator: bool = False

    @property
    def name(self) -> str:
        return "-".join(
            ("stateful" if self.stateful else "plain", "seedable" if self.seedable else "default")
            + (() if self.shuffle else ("in-order",))
            + (("generator",) if self.own_generator else ())
            + ("between" if self.save_after is None else f"after{self.save_after}",)
        )


class Dropped(nn.Module):
    """Its loss depends on the state of torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


class Run:
    """A script: everything prepared, and a trace of (samples, loss) of each step."""

    def __init__(self, accelerator: Any, script: Script) -> None:
        self.accelerator, self.trace = accelerator, []  # type: Any, list[tuple[list[int], float]]
        model = Dropped()
        swa.shard(accelerator, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        generator = torch.Generator().manual_seed(torch.initial_seed()) if script.own_generator else None
        loader = DataLoader(
            list(range(SAMPLES)), batch_size=PER_RANK, shuffle=script.shuffle, generator=generator
        )
        self.model, self.optimizer, self.loader = swa.prepare(accelerator, model, optimizer, loader)

    def step(self, numbers: torch.Tensor) -> None:
        loss = self.model(numbers[:, None] / SAMPLES).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trace.append((numbers.tolist(), float(loss.detach())))


def _accelerator(script: Script) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return accelerator_with(
        plugin={"transformer_cls_names_to_wrap": ["Linear"]},
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=script.stateful, use_seedable_sampler=script.seedable
        ),
    )


def first_life(scripts: list[Script], root: str) -> dict[str, Any]:
    """Each script trains through, and saves once on its way; what it did after that, by name."""
    found = {}
    for script in scripts:
        with _accelerator(script) as accelerator:
            torch.manual_seed(11)
            run = Run(accelerator, script)
            for epoch in range(EPOCHS):
                for done, numbers in enumerate(run.loader, 1):
                    run.step(numbers)
                    if (epoch, done) == (1, script.save_after):
                        swa.save_state(accelerator, f"{root}/{script.name}")
                        run.trace.clear()
                if epoch == 0 and script.save_after is None:
                    swa.save_state(accelerator, f"{root}/{script.name}")
                    run.trace.clear()
            found[script.name] = run.trace
    return found


def second_life(scripts: list[Script], root: str) -> dict[str, Any]:
    """Each script made anew under another seed, resumed as Accelerate's examples do, trained to the end."""
    found = {}
    for script in scripts:
        with _accelerator(script) as accelerator:
            torch.manual_seed(99)
            run = Run(accelerator, script)
            report = swa.load_state(accelerator, f"{root}/{script.name}")
            done = script.save_after or 0
            begin = 2 if done == STEPS else 1
            for epoch in range(begin, EPOCHS):
                batches = run.loader
                if epoch == begin == 1 and done and not script.stateful:
                    batches = ShardwiseAccelerator.skip_first_batches(accelerator, run.loader, done)
                for numbers in batches:
                    run.step(numbers)
                if batches is not run.loader:
                    run.loader.set_epoch(epoch + 1)
            found[script.name] = (run.trace, report.exact, report.caveats, report.differences)
    return found


class _Counted(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(SAMPLES))


class SelfSeeded(BatchSampler):
    """With a generator of its own."""

    generator = random.Random(3)


def caveats_of_others() -> dict[str, Any]:
    """By name: the message for a position inside an epoch, after two batches, taken with other loaders and settings."""
    from accelerate.utils import DataLoaderConfiguration

    found: dict[str, Any] = {}

    def saved_and_taken_up(
        dataset: Any, rng_types: list[str] | None = None, batch_size: int = PER_RANK, **options: Any
    ) -> tuple[str, ...]:
        with _loaders(rng_types) as accelerator:
            first = 1 if "batch_sampler" in options else PER_RANK
            loader = accelerator.prepare(DataLoader(dataset, batch_size=first, **options))
            batches = iter(loader)
            _ = next(batches), next(batches)
            state = LoaderPositions([loader]).state_dict()
            other = accelerator.prepare(DataLoader(dataset, batch_size=batch_size, **options))
            positions = LoaderPositions([other])
            positions.load_state_dict(state)
            return positions.caveats

    def _loaders(rng_types: list[str] | None = None, stateful: bool = True) -> Any:
        return accelerator_with(
            rng_types=rng_types,
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=stateful, use_seedable_sampler=True, dispatch_batches=False
            ),
        )

    numbers = list(range(SAMPLES))
    found["none"] = saved_and_taken_up(numbers, shuffle=True)
    found["workers"] = saved_and_taken_up(numbers, num_workers=1)
    found["kept workers"] = saved_and_taken_up(numbers, num_workers=1, persistent_workers=True)
    found["iterable"] = saved_and_taken_up(_Counted())
    found["rng_types"] = saved_and_taken_up(numbers, ["torch"])
    found["batch"] = saved_and_taken_up(numbers, batch_size=1)
    found["own batches"] = saved_and_taken_up(
        numbers, batch_size=1, batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13]]
    )
    with _loaders(stateful=False) as accelerator:
        own = accelerator.prepare(
            DataLoader(numbers, batch_sampler=SelfSeeded(range(SAMPLES), PER_RANK, False))
        )
        positions = LoaderPositions([own])
        state = positions.state_dict()
        positions.load_state_dict(state)
        found["own generator"] = positions.caveats
        del state["loaders"][0]["own_generators"]  # as before they were stored
        positions.load_state_dict(state)
        found["older"] = positions.caveats
    with _loaders(stateful=False) as accelerator:
        loader = accelerator.prepare(DataLoader(numbers, batch_size=PER_RANK, shuffle=True))
        rest = iter(accelerator.skip_first_batches(loader, 2))
        next(rest)
        positions = LoaderPositions([loader])
        positions.load_state_dict(positions.state_dict())
        found["skipped"] = positions.caveats
        with _loaders() as other:
            stateful = other.prepare(DataLoader(numbers, batch_size=PER_RANK))
            for name, wrong in (("stateful", [stateful]), ("two", [loader, loader])):
                try:
                    LoaderPositions(wrong).load_state_dict(positions.state_dict())
                except StateError as error:
                    found[name] = str(error)
    return found
