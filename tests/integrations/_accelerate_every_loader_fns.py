"""What the ranks of test_accelerate_every_loader.py run: each kind of loader in two lives, resumed at three places."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardwise.integrations import accelerate as swa
from shardwise.integrations.accelerate import ShardwiseAccelerator
from tests.integrations._accelerate_fns import accelerator_with

#: 22 samples, 2 on each of two ranks: 6 steps an epoch.
SAMPLES, STEPS, EPOCHS = 22, 6, 3
#: (epoch, batches of it that were trained) at each save.
PLACES = {"inside epoch 1": (0, 2), "between": (0, STEPS), "inside epoch 2": (1, 3)}


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Noisy(Rows):
    """Augments with the global generator of the process that reads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) / 10


class SeededRows(Rows):
    """Augments with a generator of its own."""

    def __init__(self) -> None:
        self.drawn = np.random.default_rng(5)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index + self.drawn.random() / 10)


class Streamed(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(SAMPLES)))


class Lazy(Sampler[int]):
    """Draws from the global generator as it goes along."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class OwnBatches(BatchSampler):
    """Begins each epoch's batches at a random place."""

    def __iter__(self) -> Iterator[list[int]]:
        every = list(super().__iter__())
        begin = int(torch.randint(len(every), ()))
        return iter(every[begin:] + every[:begin])


class Reshuffled(BatchSampler):
    """Shuffles a list of batches once more for each epoch."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES), 2, False)  # type: ignore[arg-type]
        self.batches = [*super().__iter__()]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


class SelfSeeded(BatchSampler):
    """Shuffles batches with a generator of its own, as in diffusers' scripts for Flux 2."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES), 2, False)  # type: ignore[arg-type]
        self.generator = random.Random(7)

    def __iter__(self) -> Iterator[list[int]]:
        batches = [*super().__iter__()]
        self.generator.shuffle(batches)
        return iter(batches)


class Within(BatchSampler):
    """Hands on the batches of another sampler."""

    def __init__(self, inner: BatchSampler) -> None:
        super().__init__(inner.sampler, inner.batch_size, inner.drop_last)
        self.batch_sampler = inner

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.initial_seed() + 1)


def own_batches() -> DataLoader[Any]:
    return DataLoader(Rows(), batch_sampler=OwnBatches(range(SAMPLES), 2, False))  # type: ignore[arg-type]


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Rows(), batch_size=2, shuffle=True)


def sampled(make: Callable[[], Any], dataset: Any = None, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Rows() if dataset is None else dataset, batch_size=2, sampler=make(), **options)


def shuffled(**options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Rows(), **{"batch_size": 2, "shuffle": True, **options})


@dataclass(frozen=True)
class Kind:
    """A loader as a script makes it, and how it configures Accelerate's."""

    make: Callable[[], Any]
    config: dict[str, Any] = field(default_factory=dict)
    ours: bool = True
    """Whether the script calls ``swa.prepare``; else ``accelerator.prepare``."""
    reseeds: bool = False
    """Whether the second life seeds as the first one, before it makes the loader."""
    rng_types: list[str] | None = None

    @property
    def is_stateful(self) -> bool:
        return bool(self.config.get("use_stateful_dataloader"))


STATEFUL = {"use_stateful_dataloader": True}


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i % 3 for i in range(SAMPLES)], SAMPLES)


def kinds() -> dict[str, Kind]:
    """By name. Functions and not values: they are made in each rank."""
    return {
        "shuffled": Kind(shuffled(), STATEFUL),
        "seedable": Kind(shuffled(), {**STATEFUL, "use_seedable_sampler": True}),
        "in order": Kind(shuffled(shuffle=False), STATEFUL),
        "weighted": Kind(sampled(weighted), STATEFUL),
        "subset": Kind(sampled(lambda: SubsetRandomSampler(range(SAMPLES))), STATEFUL),
        "replacement": Kind(sampled(lambda: RandomSampler(range(SAMPLES), replacement=True)), STATEFUL),
        "own generator": Kind(lambda: shuffled(generator=generator())(), STATEFUL),
        "split": Kind(shuffled(batch_size=4), {**STATEFUL, "split_batches": True}),
        "rng_types": Kind(shuffled(), STATEFUL, rng_types=["torch", "generator"]),
        "torchdata": Kind(stateful, STATEFUL),
        "dispatched": Kind(shuffled(), {**STATEFUL, "dispatch_batches": True}),
        "lazy": Kind(sampled(Lazy), STATEFUL),
        "own batches": Kind(own_batches, STATEFUL),
        "reshuffled": Kind(lambda: DataLoader(Rows(), batch_sampler=Reshuffled()), STATEFUL),
        "plain reshuffled": Kind(lambda: DataLoader(Rows(), batch_sampler=Reshuffled())),
        "self-seeded": Kind(lambda: DataLoader(Rows(), batch_sampler=SelfSeeded()), STATEFUL),
        "nested self-seeded": Kind(lambda: DataLoader(Rows(), batch_sampler=Within(SelfSeeded())), STATEFUL),
        "seeded rows": Kind(sampled(weighted, SeededRows()), STATEFUL),
        "plain seeded rows": Kind(sampled(weighted, SeededRows())),
        "plain self-seeded": Kind(lambda: DataLoader(Rows(), batch_sampler=SelfSeeded())),
        "noisy": Kind(sampled(weighted, Noisy()), STATEFUL),
        "workers": Kind(shuffled(num_workers=1), STATEFUL),
        "workers, own generator": Kind(
            lambda: shuffled(generator=generator(), num_workers=2, prefetch_factor=3)(), STATEFUL
        ),
        "weighted, workers": Kind(sampled(weighted, num_workers=2), STATEFUL),
        "streamed": Kind(lambda: DataLoader(Streamed(), batch_size=2), STATEFUL),
        "plain shuffled": Kind(shuffled()),
        "plain weighted": Kind(sampled(weighted)),
        "plain noisy": Kind(sampled(weighted, Noisy())),
        "plain dispatched": Kind(shuffled(), {"dispatch_batches": True}),
        "theirs": Kind(shuffled(), STATEFUL, ours=False),
        "theirs, noisy": Kind(sampled(weighted, Noisy()), STATEFUL, ours=False),
        "theirs, seeded before": Kind(shuffled(), STATEFUL, ours=False, reseeds=True),
        "theirs, workers": Kind(shuffled(num_workers=1), STATEFUL, ours=False),
        "theirs, seeded before, workers": Kind(shuffled(num_workers=1), STATEFUL, ours=False, reseeds=True),
    }


class Dropped(nn.Module):
    """Its loss depends on the state of torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


class Run:
    """A script: everything prepared, and a trace of (samples, loss) of each step."""

    def __init__(self, accelerator: Any, kind: Kind, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.accelerator, self.trace = accelerator, []  # type: Any, list[tuple[list[float], float]]
        model = Dropped()
        swa.shard(accelerator, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        made = (model, optimizer, kind.make())
        prepared = swa.prepare(accelerator, *made) if kind.ours else accelerator.prepare(*made)
        self.model, self.optimizer, self.loader = prepared

    def step(self, rows: torch.Tensor) -> None:
        loss = self.model(rows[:, None] / SAMPLES).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trace.append((rows.tolist(), float(loss.detach())))


def accelerator_of(kind: Kind) -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return accelerator_with(
        plugin={"transformer_cls_names_to_wrap": ["Linear"]},
        rng_types=kind.rng_types,
        dataloader_config=DataLoaderConfiguration(**kind.config),
    )


def first_life(root: str, names: list[str]) -> dict[str, Any]:
    """Each kind trains through, and saves at each place on its way; what it did after each save."""
    found = {}
    for name in names:
        kind = kinds()[name]
        with accelerator_of(kind) as accelerator:
            run = Run(accelerator, kind, 11)
            saved: dict[str, int] = {}
            for epoch in range(EPOCHS):
                for done, rows in enumerate(run.loader, 1):
                    run.step(rows)
                    for place, where in PLACES.items():
                        if where == (epoch, done) and done < STEPS:
                            swa.save_state(accelerator, f"{root}/{name}/{place}")
                            saved[place] = len(run.trace)
                if epoch == 0:
                    swa.save_state(accelerator, f"{root}/{name}/between")
                    saved["between"] = len(run.trace)
            found |= {(name, place): run.trace[begin:] for place, begin in saved.items()}
    return found


def second_life(root: str, names: list[str]) -> dict[str, Any]:
    """Each kind made anew under another seed, resumed at each place as Accelerate's examples do, trained to the end."""
    found = {}
    for name in names:
        kind = kinds()[name]
        for place, (epoch, done) in PLACES.items():
            saved = f"{root}/{name}/{place}"
            if place == "inside epoch 2":  # by way of a life that saves again before it trains
                with accelerator_of(kind) as accelerator:
                    Run(accelerator, kind, 11 if kind.reseeds else 55)
                    swa.load_state(accelerator, saved)
                    swa.save_state(accelerator, saved := f"{saved} again")
            with accelerator_of(kind) as accelerator:
                run = Run(accelerator, kind, 11 if kind.reseeds else 99)
                report = swa.load_state(accelerator, saved)
                inside = done < STEPS
                first = epoch if inside else epoch + 1
                for number in range(first, EPOCHS):
                    batches = run.loader
                    if number == first and inside and not kind.is_stateful:
                        batches = ShardwiseAccelerator.skip_first_batches(accelerator, run.loader, done)
                    for rows in batches:
                        run.step(rows)
                    if batches is not run.loader:
                        run.loader.set_epoch(number + 1)
                found[name, place] = (run.trace, report.exact, report.caveats, report.differences)
    return found
