"""What the ranks of test_trainer_data.py run: one small run per sampler and loader, uninterrupted, and resumed at each place."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from transformers import TrainerCallback

from tests.harness.versions import lacking
from tests.integrations._trainer_parts import arguments

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer

ROWS = 32
#: In the first epoch, at its end, in the second, in the third. Eight batches an epoch.
PLACES = (1, 2, 8, 10, 17)
LAST = 19


class Regression(nn.Module):
    """With dropout, so that each step draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layers(x).squeeze(-1) - y) ** 2).mean()}


def row(index: int) -> dict[str, Any]:
    x = torch.randn(4, generator=torch.Generator().manual_seed(index))
    return {"x": x, "y": x.sum(), "input_ids": list(range(1 + index % 7))}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([r[key] for r in rows]) for key in ("x", "y")}


class Rows(Dataset[Any]):
    def __init__(self, changed: Callable[[], float] | None = None) -> None:
        self.changed = changed

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= ROWS:
            raise IndexError(index)
        found = row(index)
        if self.changed is not None:
            found["x"] = found["x"] + self.changed()
        return found


class Counting(Rows):
    """Counts what is read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        self.reads += 1
        return {**found, "x": found["x"] + self.reads / 100}


def three_draws() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


class Stream(IterableDataset[Any]):
    """Without a length; the order is that of the rows, or drawn as they are read, or goes on between epochs."""

    def __init__(self, kind: str = "plain") -> None:
        self.kind = kind
        self.passes = 0
        self.generator = np.random.default_rng(3) if kind == "own generator" else None

    def __iter__(self) -> Iterator[Any]:
        order = list(range(ROWS))
        if self.kind == "counts":
            self.passes += 1
            order = order[self.passes :] + order[: self.passes]
        if self.kind == "own generator":
            assert self.generator is not None
            self.generator.shuffle(order)
        if self.kind == "drawn at the start":
            random.shuffle(order)
        while order:
            yield row(order.pop(random.randrange(len(order)) if self.kind == "drawn" else 0))


class SizedStream(Stream):
    def __len__(self) -> int:
        return ROWS


class NumpySampler(Sampler[int]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(ROWS).tolist()


class Reshuffled(NumpySampler):
    """Shuffles its own order once more for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(ROWS))

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        yield from self.order


class AsItGoes(Sampler[int]):
    """Draws each index from the global generator when it is asked for it."""

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield random.randrange(ROWS)


class WithoutRepeat(AsItGoes):
    def __iter__(self) -> Iterator[int]:
        left = list(range(ROWS))
        while left:
            yield left.pop(random.randrange(len(left)))


@dataclass
class Kind:
    """A loader that a Trainer can be given."""

    options: dict[str, Any] = field(default_factory=dict)
    dataset: Callable[[], Any] = Rows
    sampler: Callable[[], Any] | None = None
    loader: Callable[[Any], Any] | None = None
    base: dict[str, Any] = field(default_factory=dict)
    """Attributes of the trainer's class."""


def _loader(trainer: Any, **options: Any) -> DataLoader[Any]:
    size = trainer.args.per_device_train_batch_size
    return DataLoader(trainer.train_dataset, size, collate_fn=collate, **options)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def _accelerator(**options: Any) -> dict[str, Any]:
    return {"accelerator_config": options}


def _train_state_without_place(trainer: Any, **options: Any) -> Any:
    """As checkpoints were that know no place in the data."""
    return ShardwiseTrainer._train_state(trainer, **{**options, "data": False})


BEFORE = {"_train_state": _train_state_without_place, "_place": lambda trainer: {}}
KINDS: dict[str, Kind] = {
    "seedable": Kind(),
    "not seedable": Kind(_accelerator(use_seedable_sampler=False)),
    "accumulation": Kind({**_accelerator(use_seedable_sampler=False), "gradient_accumulation_steps": 2}),
    "by length": Kind({"train_sampling_strategy": "group_by_length"}),
    "sequential": Kind({"train_sampling_strategy": "sequential"}),
    "rebalanced": Kind({"train_sampling_strategy": "batch_rebalance"}),
    "weighted": Kind(sampler=lambda: WeightedRandomSampler([1.0] * ROWS, ROWS)),
    "own generator": Kind(sampler=lambda: RandomSampler(range(ROWS), generator=_generator())),
    "own generator, not seedable": Kind(
        _accelerator(use_seedable_sampler=False),
        sampler=lambda: RandomSampler(range(ROWS), generator=_generator()),
    ),
    "numpy generator": Kind(sampler=NumpySampler),
    "dataset that counts": Kind(dataset=Counting),
    "order of its own": Kind(sampler=Reshuffled),
    "index by index": Kind(sampler=AsItGoes),
    "own loader": Kind(loader=lambda t: _loader(t, shuffle=True)),
    "own loader with generator": Kind(loader=lambda t: _loader(t, shuffle=True, generator=_generator())),
    "own loader, prepared": Kind(loader=lambda t: t.accelerator.prepare(_loader(t, sampler=AsItGoes()))),
    "stateful loader": Kind(loader=lambda t: _stateful(t)),
    "split batches": Kind(_accelerator(split_batches=True, use_seedable_sampler=False)),
    "dispatched": Kind(_accelerator(dispatch_batches=True, use_seedable_sampler=False)),
    "augmented": Kind(dataset=lambda: Rows(three_draws)),
    "augmented, not seedable": Kind(
        _accelerator(use_seedable_sampler=False), dataset=lambda: Rows(three_draws)
    ),
    "augmented in workers": Kind({"dataloader_num_workers": 2}, dataset=lambda: Rows(three_draws)),
    "workers": Kind({"dataloader_num_workers": 2, **_accelerator(use_seedable_sampler=False)}),
    "stream": Kind(dataset=Stream),
    "stream with a length": Kind(dataset=SizedStream),
    "stream in workers": Kind({"dataloader_num_workers": 1}, dataset=lambda: Stream("drawn")),
    "stream with a generator": Kind(dataset=lambda: Stream("own generator")),
    "stream drawn at the start": Kind(dataset=lambda: Stream("drawn at the start")),
    "stream, dispatched": Kind(_accelerator(dispatch_batches=True), dataset=Stream),
    # Not to be repeated, or not known to be
    "no place stored": Kind(base=BEFORE),
    "no place stored, not seedable": Kind(_accelerator(use_seedable_sampler=False), base=BEFORE),
    "stream that counts": Kind(dataset=lambda: Stream("counts")),
    "stream drawn": Kind(dataset=lambda: Stream("drawn")),
    "index by index, without repeat": Kind(sampler=WithoutRepeat),
    "augmented, skipped": Kind(dataset=lambda: Rows(three_draws), base={"reads_again": False}),
    "persistent workers": Kind({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}),
    "persistent workers, augmented": Kind(
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        dataset=lambda: Rows(three_draws),
    ),
}


def _stateful(trainer: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    size = trainer.args.per_device_train_batch_size
    return StatefulDataLoader(trainer.train_dataset, size, collate_fn=collate, shuffle=True)


class Save(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step in PLACES


def life(kind: Kind, folder: str, *, resume: str | None = None) -> Any:
    """One life of a run; dropout and draws of the data come from the same generators."""
    world = dist.get_world_size()
    size = 4 if kind.options.get("accelerator_config", {}).get("split_batches") else 4 // world

    class Mine(ShardwiseTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return super()._get_train_sampler(*args) if kind.sampler is None else kind.sampler()

        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader() if kind.loader is None else kind.loader(self)

    for name, value in kind.base.items():
        setattr(Mine, name, value)
    options = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 1,
        "max_steps": LAST,
        "save_strategy": "no",
        "save_total_limit": None,
        "remove_unused_columns": False,
        "logging_steps": LAST,
        "seed": 42,
        **kind.options,
    }
    with arguments(folder, fsdp=False, **options) as args:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        trainer = Mine(Regression(), args, train_dataset=kind.dataset(), data_collator=collate)
        trainer.add_callback(Save() if resume is None else TrainerCallback())
        if resume is not None:  # other numbers than the first life had, until the place is found
            random.seed(77), np.random.seed(77), torch.manual_seed(77)
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def resumed(names: list[str], root: str) -> dict[str, Any]:
    """For each loader and place: whether the end is bitwise that of the uninterrupted run, and what the report says."""
    found: dict[str, Any] = {}
    for name in names:
        kind = KINDS[name]
        folder = f"{root}/{names.index(name)}-whole"
        expected = [p.detach().clone() for p in life(kind, folder).model.parameters()]
        for place in PLACES:
            again = f"{root}/{names.index(name)}-{place}"
            trainer = life(kind, again, resume=f"{folder}/checkpoint-{place}")
            report = trainer.resume_report
            equal = all(map(torch.equal, expected, trainer.model.parameters()))
            found[f"{name} at {place}"] = equal, report.exact, report.differences + report.skipped
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
            assert os.listdir(root)
        dist.barrier()
    return found
