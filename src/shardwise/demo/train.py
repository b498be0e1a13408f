"""The demo's training worker, and the plan that is shown before it starts."""

from __future__ import annotations

import json
import sys
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModel

import shardwise as sw
from shardwise.demo.course import Course, Prepared, die_in_next_save
from shardwise.demo.embed import TEMPERATURE, embed, load_tokenizer
from shardwise.errors import ShardwiseError

from ..fit.plan import plan
from ..fit.records import TrainingSpec
from ..operations.operation import size
from .embed import MAX_TOKENS

# ----------------------------------------------------------------------------------------------------
# One training worker: load sharded, resume, train, save, export.
#
#     torchrun --nproc-per-node 2 -m shardwise.demo.train OUT run-1 [--kill]
#
# The same script begins a run and resumes it, on any number of ranks. Only the records and the crash are specific to the demo.

_LEARNING_RATE = 1e-4


def train(course: Course, record: Record, *, is_killed: bool) -> None:
    """The whole run of one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    pairs = [(first, rest) for first, rest in json.loads(course.train_pairs.read_text(encoding="utf-8"))]
    tokenizer = load_tokenizer(str(course.model.directory))
    model = load_model(course.model, mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.1, total_iters=course.steps
    )
    # The same global batches on any number of ranks: a run that continues with more ranks skips and repeats nothing.
    sampler = sw.ElasticSampler(pairs, global_batch_size=course.batch_size, drop_last=True)
    loader = sw.ResumableLoader(DataLoader(pairs, batch_sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
    batches = chain.from_iterable(repeat(loader))
    state = sw.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, dataloader=loader)

    with sw.Checkpointer(course.checkpoints, keep_last=3) as checkpoints:
        resumed = checkpoints.resume(state)
        if resumed is not None:
            record.digests("resumed", resumed.step, model)
        for step in range(1 if resumed is None else resumed.step + 1, course.steps + 1):
            loss = contrastive_loss(model, tokenizer, next(batches))
            # FSDP2 averages gradients over ranks, but this loss needs their sum.
            (loss * world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            record.loss(step, loss.item())
            if step % course.save_every == 0:
                record.digests("saving", step, model)
                if is_killed and step == course.kill_step and rank == course.kill_rank:
                    die_in_next_save(course.checkpoints, rank)
                saved = checkpoints.save(state, step)
                record.say(f"step {step:3d}   loss {loss.item():.4f}   saved in {saved.seconds:.1f} s")

    # The trained model and its tokenizer as a hub directory.
    sw.export_hf(model, course.out / "export")
    if rank == 0:
        tokenizer.save_pretrained(course.out / "export")
    record.digests("exported", course.steps, model)


def load_model(prepared: Prepared, mesh: DeviceMesh) -> Any:
    """The model, sharded over ``mesh``. Dropout stays off (eval mode): steps that are trained twice can be compared."""
    # transformers imports a model's code when it builds the first one: some 50 MB that the load does not cause.
    with sw.meta_init():
        transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(prepared.directory))
    return sw.load_pretrained(
        prepared.directory,
        mesh,
        dtype=torch.float32,
        auto_class=transformers.AutoModel,
        allow_unused=prepared.allow_unused,
        allow_missing=prepared.allow_missing,
    )


def contrastive_loss(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """InfoNCE over the global batch: each first line against the rests on all ranks. Equal on every rank."""
    vectors = embed(model, tokenizer, [first for first, _ in pairs] + [rest for _, rest in pairs])
    firsts, rests = map(everyones, vectors.chunk(2))
    return cross_entropy(firsts @ rests.T / TEMPERATURE, torch.arange(len(firsts)))


def everyones(own: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks in rank order; gradients flow into this rank's."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own.detach())
    rows[dist.get_rank()] = own
    return torch.cat(rows)


class Record:
    """Writes what the ledger doesn't have and the demo's report needs, before anything can crash."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._rank = rank

    def error(self, error: ShardwiseError) -> None:
        """Write the error that ends this rank."""
        path = self._directory / f"error-rank-{self._rank}.txt"
        path.write_text(f"Rank {self._rank} says: {error}", encoding="utf-8")

    def loss(self, step: int, value: float) -> None:
        """Add a point to the loss curve, on rank 0."""
        if self._rank == 0:
            with (self._directory / "loss.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, "loss": value}) + "\n")

    def digests(self, when: str, step: int, model: Any) -> None:
        """Fingerprints of the live weights. Every rank must call it."""
        found = sw.digest(model)
        if self._rank == 0:
            path = self._directory / f"digests-{when}-{step}.json"
            path.write_text(json.dumps(found), encoding="utf-8")

    def say(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self._rank == 0:
            print(text, flush=True)


def main(out: str, name: str, *flags: str) -> None:
    """Start the process group and train; a ShardwiseError ends the rank without a traceback."""
    course = Course.read(Path(out))
    dist.init_process_group("gloo")
    record = Record(course.out / name, dist.get_rank())
    try:
        with sw.reports.memory_ledger(course.out / "ledger"):
            train(course, record, is_killed="--kill" in flags)
    except ShardwiseError as error:
        record.error(error)
        raise SystemExit(1) from error
    finally:
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------
# The plan of a demo's starts.


def plan_starts(course: Course, console: Console) -> None:
    """Plan both starts, beside the run, where its report finds the plans; and print what steps of the first take."""
    for ranks in (course.ranks, course.ranks + 1):
        report = plan(
            course.model.directory,
            ranks=ranks,
            dtype="float32",
            auto_class=AutoModel,
            allow_unused=course.model.allow_unused,
            allow_missing=course.model.allow_missing,
            training=TrainingSpec(
                batch_size=2 * course.batch_size // ranks, sequence_length=MAX_TOKENS, device="cpu"
            ),
        )
        text = json.dumps(report.to_json(), indent=2)
        (course.out / f"plan-{ranks}-ranks.json").write_text(f"{text}\n", encoding="utf-8")
        if ranks == course.ranks and report.run is not None:
            steps = report.run.phase("steady state")
            console.print(
                f"planned for a step: {size(steps.nbytes('host'))} of memory for each of {ranks} ranks, at most "
                f"{size(steps.upper_bytes('host'))}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
