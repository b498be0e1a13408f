"""Trainers and engines that are killed, paused and restarted, and bits that flip on the way: no engine ever has wrong weights.

    python -m tests.handover.chaos --versions 1000 --seed 1

A trainer publishes versions whose every element is a function of the version. Two engines (one rank, two ranks) pull, and check all
elements of what they switched on. Meanwhile processes are killed and paused, the trainer comes back with another number of ranks, and an
engine comes back without weights. Exit status 1: an engine had wrong weights, or nothing moved for two minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from shardwise.errors import IntegrityError, ShardwiseError
from shardwise.handover.links import Address, new_secret
from shardwise.publish import hosts
from tests.harness.process import Process, kill_all, spawn, worker_env

SHAPES = {"rows": (301, 40), "columns": (7, 1000), "vector": (513,), "scalar": ()}
STILL_S = 120.0


def values(name: str, version: int, life: int) -> torch.Tensor:
    """All elements of a tensor at a version of a trainer's life; about one in 25 differs from the version before."""
    shape = SHAPES[name]
    if name == "scalar":
        return torch.tensor(float(life), dtype=torch.bfloat16)
    index = torch.arange(int(torch.Size(shape).numel()))
    changed = (index % 50 == version % 50) * version + life % 7
    return ((index * 31 + len(name)) % 997 + changed).to(torch.bfloat16).view(shape)


def main(role: str, *arguments: str) -> int:
    """One process: ``trainer`` or ``engine``."""
    return {"trainer": trainer, "engine": engine}[role](*arguments)


def trainer(rank: str, world: str, store: str, url: str, progress: str, versions: str, life: str) -> int:
    """Publish versions after the last one that was published, to the last; then wait to be killed."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    model = nn.Module()
    for name in SHAPES:
        model.register_parameter(name, nn.Parameter(values(name, 0, 0), requires_grad=False))
    model.get_parameter("rows").requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (int(world),)), ignored_params={model.scalar})
    with sw.handover.WeightSender(model, url=url, timeout_s=20) as sender:
        first = (
            int(Path(progress).read_text()) - 2
        )  # as after a resume: the last numbers come again, with other values
        for version in range(max(1, first), int(versions) + 1):
            with torch.no_grad():
                for name in SHAPES:
                    parameter = model.get_parameter(name)
                    whole = values(name, version, int(life))
                    if isinstance(parameter, DTensor):
                        own = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                        parameter.to_local().copy_(own.to_local())
                    else:
                        parameter.copy_(whole)
            sender.publish(version)
            if rank == "0":
                partial = Path(f"{progress}.new")
                partial.write_text(str(version))
                os.replace(partial, progress)
            time.sleep(0.05)
        print("published all", flush=True)
        time.sleep(3600)
    return 0


def engine(rank: str, world: str, store: str, url: str, flips: str, versions: str, seed: str) -> int:
    """Pull until the last version is on; check each."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    _flip_bits(random.Random(f"{seed} {rank}"), float(flips))
    mesh = init_device_mesh("cpu", (int(world),))
    mine: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        empty = torch.full(shape, -1.0, dtype=torch.bfloat16)
        mine[name] = distribute_tensor(empty, mesh, [Shard(len(shape) - 1)]) if shape else empty
    receiver = sw.handover.WeightReceiver(mine, url, carry="tcp" if int(seed) % 2 else "auto", timeout_s=5)
    while receiver.version != int(versions):
        try:
            report = receiver.pull(wait_s=30)
        except IntegrityError as error:
            print(f"refused: {error}", flush=True)
            report = None
        except ShardwiseError as error:
            print(f"away: {error}", flush=True)
            if "rank" in type(error).__name__.lower():
                return 3  # a rank of this engine is gone
            report = None
        for name, tensor in mine.items() if receiver.version is not None else ():
            whole = values(name, receiver.version, int(mine["scalar"]))
            if isinstance(tensor, DTensor):
                whole = distribute_tensor(whole, mesh, tensor.placements).to_local()
                tensor = tensor.to_local()
            if not torch.equal(tensor, whole):
                print(f"WRONG {name} at version {receiver.version}", flush=True)
                os._exit(9)
        if report is not None:
            print(f"on {report.version} {report.changed} {report.carry.partition(':')[0]}", flush=True)
    print("done", flush=True)
    return 0


def _flip_bits(generator: random.Random, rate: float) -> None:
    """Flip a bit of one in ``1 / rate`` pieces that arrive."""
    receive = hosts.receive_into

    def flipping(link: Any, view: memoryview, until: float) -> None:
        receive(link, view, until)
        if view.nbytes > 64 and generator.random() < rate:
            at = generator.randrange(view.nbytes)
            view[at] ^= 1 << generator.randrange(8)

    hosts.receive_into = flipping


# ----------------------------------------------------------------------------------------------------


class Group:
    """The processes of a trainer or an engine."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.starts = folder, name, 0
        self.processes: list[Process] = []

    def start(self, role: str, world: int, *arguments: str) -> None:
        self.starts += 1
        store = self.folder / f"{self.name}-{self.starts}"
        log = self.folder / f"{self.name}.log"
        self.processes = [
            spawn(
                __spec__.name, role, str(rank), str(world), str(store), *arguments, log=log, env=worker_env()
            )
            for rank in range(world)
        ]

    def end(self) -> None:
        kill_all(self.processes)

    def log(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self) -> list[int]:
        """Exit statuses of processes that have ended."""
        return [code for one in self.processes if (code := one.poll()) is not None]


def run(versions: int, seed: int, folder: Path) -> dict[str, int]:
    """Raises :class:`AssertionError` with the logs."""
    generator = random.Random(seed)
    progress = folder / "progress"
    progress.write_text("0")
    url = str(Address("127.0.0.1", free_port(), new_secret()))
    trainers = Group(folder, "trainer")
    engines = [Group(folder, f"engine{k}") for k in range(2)]
    counts = {"kills of a trainer": 0, "kills of an engine": 0, "pauses": 0}

    def start_trainer() -> None:
        trainers.start(
            "trainer",
            generator.choice([1, 2, 3]),
            url,
            str(progress),
            str(versions),
            str(trainers.starts + 1),
        )

    def start_engine(k: int) -> None:
        engines[k].start("engine", k + 1, url, "0.02", str(versions), str(generator.randrange(1000)))

    start_trainer()
    start_engine(0)
    is_late, last, since = True, "", time.monotonic()
    try:
        while True:
            time.sleep(generator.uniform(0.2, 1.0))
            now = progress.read_text() + "".join(one.log()[-200:] for one in engines)
            if now != last:
                last, since = now, time.monotonic()
            assert time.monotonic() - since < STILL_S, "nothing moved"
            if is_late and int(progress.read_text()) > versions // 4:
                start_engine(1)
                is_late = False
            for k, one in enumerate(engines):
                codes = one.ended()
                assert 9 not in codes, "an engine had wrong weights"
                if codes and any(codes):
                    one.end()
                    start_engine(k)
            if not is_late and all(one.ended() == [0] * (k + 1) for k, one in enumerate(engines)):
                break
            if int(progress.read_text()) >= versions:
                continue
            match generator.randrange(12):
                case 0:
                    trainers.end()
                    time.sleep(generator.uniform(0, 1))
                    start_trainer()
                    counts["kills of a trainer"] += 1
                case 1 | 2:
                    k = generator.randrange(len(engines))
                    running = [p for p in engines[k].processes if p.poll() is None]
                    if running:
                        os.kill(generator.choice(running).pid, signal.SIGKILL)
                        counts["kills of an engine"] += 1
                case 3 | 4:
                    everyone = [*trainers.processes, *engines[0].processes, *engines[1].processes]
                    paused = generator.choice([p for p in everyone if p.poll() is None])
                    os.kill(paused.pid, signal.SIGSTOP)
                    time.sleep(generator.uniform(0.1, 1.5))
                    os.kill(paused.pid, signal.SIGCONT)
                    counts["pauses"] += 1
    except BaseException as error:
        logs = "\n".join(f"---- {one.name}\n{one.log()[-6000:]}" for one in (trainers, *engines))
        raise AssertionError(f"seed {seed}: {error}\n{logs}") from error
    finally:
        for one in (trainers, *engines):
            one.end()
    logs = "".join(one.log() for one in engines)
    assert "WRONG" not in logs
    counts["versions switched on"] = logs.count("\non ") + logs.startswith("on ")
    counts["of them by changes"] = sum(
        line.startswith("on ") and line.split()[2] != "0" for line in logs.splitlines()
    )
    counts["refused"] = logs.count("refused: ")
    return counts


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        print(run(arguments.versions, arguments.seed, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(program())
