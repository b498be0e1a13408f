"""What the ranks run in the tests of Checkpointer, its failures, and verify()."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.publish.lock import mark
from tests.checkpoint._resume_fns import assert_same_bits, bits, listing
from tests.harness.logged import warnings_logged

MIB = 1024**2


class Small(nn.Module):
    """One sharded layer, a plain buffer, and optionally a plain parameter."""

    def __init__(self, width: int = 24, *, plain: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 10)
        self.register_buffer("running_mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if plain:
            self.temperature = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def state_at(step: int, width: int = 24, *, optimizer: bool = True, **extra: Any) -> sw.TrainState:
    """A state whose every value is a function of ``step``."""
    model = Small(width)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    made = torch.optim.AdamW(model.parameters(), lr=1e-3 * (step + 1)) if optimizer else None
    state = sw.TrainState(model=model, optimizer=made, extra={"label": f"at {step}", **extra})
    set_values(state, step)
    return state


@torch.no_grad()
def set_values(state: sw.TrainState, step: int) -> None:
    """Give every tensor the values of ``step``, the same at every world size."""
    for k, parameter in enumerate(state.model.parameters()):
        parameter.fill_(step + k / 8)
        parameter.grad = torch.full_like(parameter, step + 1.0)
    if state.optimizer is not None:
        state.optimizer.step()
    for buffer in state.model.buffers():
        buffer.fill_(step)
    state.extra["label"] = f"at {step}"
    torch.manual_seed(step)


def failure(call: Callable[[], Any]) -> tuple[str, str]:
    """(type, text) of the error that a call raises; every rank must see one."""
    try:
        call()
    except ShardwiseError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def barrier() -> None:
    dist.barrier()


def on_first(work: Callable[[], Any]) -> None:
    """Run on rank 0, with the others waiting before and after."""
    barrier()
    if dist.get_rank() == 0:
        work()
    barrier()


# ----------------------------------------------------------------------------------------------- damage


def _flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 0x10]))


def _slices(step: Path, kind: str) -> list[Path]:
    return sorted((step / kind).glob("shard-*.safetensors"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "model payload": lambda step: _flip(_slices(step, "model")[-1], -3),
    "optimizer payload": lambda step: _flip(_slices(step, "optimizer")[0], -3),
    "header": lambda step: _flip(_slices(step, "model")[0], 40),
    "header length": lambda step: _flip(_slices(step, "optimizer")[-1], 2),
    "manifest": lambda step: _flip(step / "manifest.json", 300),
    "manifest's first byte": lambda step: _flip(step / "manifest.json", 0),
    "state.json": lambda step: _flip(step / "state.json", 30),
    "rank file": lambda step: _flip(step / "rank" / "00001.json", 30),
    "rank tensors": lambda step: _flip(step / "rank" / "00000.safetensors", -9),
    "truncated payload": lambda step: os.truncate(_slices(step, "model")[0], 100),
    "truncated manifest": lambda step: os.truncate(step / "manifest.json", 200),
    "grown file": lambda step: os.truncate(step / "state.json", 9999),
    "deleted slice": lambda step: _slices(step, "optimizer")[0].unlink(),
    "deleted rank file": lambda step: (step / "rank" / "00001.json").unlink(),
    "deleted folder": lambda step: shutil.rmtree(step / "model"),
    "deleted manifest": lambda step: (step / "manifest.json").unlink(),
    "manifest a folder": lambda step: ((step / "manifest.json").unlink(), (step / "manifest.json").mkdir()),
    "empty": lambda step: (shutil.rmtree(step), step.mkdir()),
}


def save_two(root: str) -> None:
    """Steps 1 and 2 at this world size."""
    with sw.Checkpointer(root) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_at(step), step)


def falls_back(pristine: str, scratch: str) -> dict[str, dict[str, Any]]:
    """For each damage to the newest step: resume takes the older one and says so. Facts by damage."""
    found = {}
    expected = bits(state_at(1))
    for name, damage in DAMAGES.items():
        root = os.path.join(scratch, name.replace(" ", "-"))

        def prepare(root: str = root, damage: Callable[[Path], Any] = damage) -> None:
            shutil.copytree(pristine, root)
            damage(Path(root, "step-00000002"))

        on_first(prepare)
        state = state_at(7)
        with sw.Checkpointer(root) as checkpoints, warnings_logged() as texts:
            report = checkpoints.resume(state)
            assert report is not None
            barrier()
            names = listing(root)
            checkpoints.save(state, 2)
        assert (report.step, report.superseded) == (1, ()), (name, report)
        assert_same_bits(bits(state), expected)
        assert state.extra["label"] == "at 1"
        found[name] = {"damaged": dict(report.damaged), "warnings": texts, "names": names}
    return found


def all_damaged(pristine: str, root: str) -> dict[str, Any]:
    """No step is valid: an error, on every rank, and everything stays where it is."""

    def prepare() -> None:
        shutil.copytree(pristine, root)
        for step, kind in ((1, "state.json"), (2, "model payload")):
            DAMAGES[kind](Path(root, f"step-{step:08d}"))

    on_first(prepare)
    before = listing(root)
    with sw.Checkpointer(root) as checkpoints:
        kind, text = failure(lambda: checkpoints.resume(state_at(7)))
        missing = failure(lambda: checkpoints.resume(state_at(7), 9))
    assert listing(root) == before
    on_first(lambda: [shutil.move(f"{root}/{n}", f"{root}/{n}.superseded-0") for n in before])
    with sw.Checkpointer(root) as checkpoints:
        aside = failure(lambda: checkpoints.resume(state_at(7)))
    return {"lost": (kind, text), "missing": missing, "aside": aside}


def resumes_among_dcp(root: str, name: str) -> tuple[str, str]:
    """A root that holds what DCP saved."""
    from torch.distributed import checkpoint as dcp

    dcp.save(state_at(7).models["model"].state_dict(), checkpoint_id=f"{root}/{name}")
    with sw.Checkpointer(root) as checkpoints:
        return failure(lambda: checkpoints.resume(state_at(7)))


def never_published(root: str) -> list[Any]:
    """Nothing there, an empty directory, leftovers only: None each time."""
    found: list[Any] = []
    with sw.Checkpointer(root) as checkpoints:
        found.append(checkpoints.resume(state_at(0)))

    def leave() -> None:
        left = Path(root, f".tmp-step-00000003-{'ab' * 8}")
        (left / "model").mkdir(parents=True)
        mark(str(left))
        (left / "model" / "shard").write_text("half")
        os.makedirs(f"{root}/.trash-step-00000001-{'cd' * 8}")

    on_first(leave)
    with sw.Checkpointer(root) as checkpoints:
        found.append(checkpoints.resume(state_at(0)))
    barrier()
    return [*found, listing(root)]


def stale_state_does_not_fit(root: str) -> dict[str, tuple[str, str]]:
    """A valid step that does not fit the live objects is an error, not damage: nothing is set aside."""
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state_at(1), 1)
        checkpoints.save(state_at(2), 2)
        wide = state_at(0, 48)
        other = state_at(0)
        other.scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 1)
        strange = sw.TrainState(model=torch.nn.Linear(2, 3))
        found = {
            "model": failure(lambda: checkpoints.resume(wide)),
            "strange": failure(lambda: checkpoints.resume(strange)),
            "scheduler": failure(lambda: checkpoints.resume(other)),
        }
        assert listing(root) == ["step-00000001", "step-00000002"]
        checkpoints.save(state_at(3, optimizer=False), 3)
        found["optimizer"] = failure(lambda: checkpoints.resume(state_at(0)))
    return found


# -------------------------------------------------------------------------------------------------- lock


def lock_is_exclusive(root: str) -> dict[str, Any]:
    """While this process holds the directory another can't have it; afterwards it can."""
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:  # a process outside the group holds it
        holder = subprocess.Popen(
            ["python3", "-c", _HOLD, f"{root}/.lock"], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
    barrier()
    found["refused"] = failure(lambda: sw.Checkpointer(root))
    if dist.get_rank() == 0:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
        holder.stdin.close()  # type: ignore[union-attr]
    barrier()
    with sw.Checkpointer(root) as checkpoints:
        found["free after kill"] = True
        checkpoints.save(state_at(1), 1)
    with sw.Checkpointer(root):
        found["free after close"] = True
    return found


_HOLD = """
import fcntl, os, sys
os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
f = open(sys.argv[1], "w+")
f.write('{"host": "elsewhere", "pid": 1}')
f.flush()
fcntl.lockf(f, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


# --------------------------------------------------------------------------------------------- retention


def retention(root: str) -> dict[str, list[str]]:
    """What is left after each stage; neither superseded nor damaged directories count or are deleted."""
    found = {}
    with sw.Checkpointer(root, keep_last=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(state_at(step), step)
        barrier()
        found["1 to 7"] = listing(root)
        report = checkpoints.resume(state_at(0), 4)
        assert report is not None
        assert report.superseded == (7, 6)
        on_first(lambda: DAMAGES["state.json"](Path(root, "step-00000004")))
        on_first(lambda: os.rename(f"{root}/step-00000004", f"{root}/step-00000004.damaged-00"))
        for step in (5, 6, 7):
            checkpoints.save(state_at(step), step)
        barrier()
        found["again"] = [n.split("-")[1] for n in listing(root)]
        found["latest"] = [Path(root, "latest").read_text()]
        again = failure(lambda: checkpoints.save(state_at(6), 6))
        found["published"] = [*again]
    report = sw.verify(f"{root}/step-00000006")
    assert report.ok
    return found


def lineage(root: str) -> list[dict[str, Any]]:
    """Manifests of a run, its continuation from an older step, and what resume takes after that."""
    with sw.Checkpointer(root) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state_at(step), step)
    with sw.Checkpointer(root) as checkpoints:
        state = state_at(0)
        report = checkpoints.resume(state, 1)
        assert report is not None
        assert report.superseded == (3, 2)
        set_values(state, 20)
        checkpoints.save(state, 2)
        barrier()
    state = state_at(0)
    with sw.Checkpointer(root) as checkpoints:
        report = checkpoints.resume(state)
        assert report is not None
        assert (report.step, report.superseded, state.extra["label"]) == (2, (), "at 20")
        barrier()
    keys = ("step", "parent_step", "run_id")
    return [
        {k: json.loads(Path(root, name, "manifest.json").read_text())[k] for k in keys}
        for name in ("step-00000001", "step-00000002")
    ]


# ---------------------------------------------------------------------------------------- failing saves


def _check_only_step_1(root: str, checkpoints: sw.Checkpointer) -> None:
    barrier()
    assert listing(root) == ["step-00000001"], listing(root)
    assert sw.verify(f"{root}/step-00000001").ok
    barrier()


def full_disk(root: str) -> tuple[str, str]:
    """A save that does not fit: an error on every rank, the step before stays, nothing else is left."""
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state_at(1), 1)
        error = failure(lambda: checkpoints.save(state_at(2, 40_000), 2))
        _check_only_step_1(root, checkpoints)
        checkpoints.save(state_at(2), 2)
    assert sw.verify(f"{root}/step-00000002").ok
    return error


def file_size_limit(root: str, limited_rank: int) -> tuple[str, str]:
    """One rank may not write more than 64 KiB into a file."""
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state_at(1), 1)
        large = state_at(2, 4000)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if dist.get_rank() == limited_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
        try:
            error = failure(lambda: checkpoints.save(large, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert os.strerror(errno.EFBIG) in error[1]
        _check_only_step_1(root, checkpoints)
        checkpoints.save(large, 2)
    assert sw.verify(f"{root}/step-00000002").ok
    return error


class Extra:
    """Raises in ``state_dict`` as long as told so."""

    failing = True

    def state_dict(self) -> dict[str, Any]:
        if self.failing:
            raise RuntimeError("sensor is off")
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state


def one_rank_raises_in_save(root: str, failing_rank: int) -> tuple[str, str]:
    """An extra raises on one rank: all raise; the same state is saved once it does no more."""
    extra = Extra()
    extra.failing = dist.get_rank() == failing_rank
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state_at(1), 1)
        state = state_at(2, sensor=extra)
        error = failure(lambda: checkpoints.save(state, 2))
        _check_only_step_1(root, checkpoints)
        extra.failing = False
        state.model(torch.ones(1, 24)).sum().backward()
        checkpoints.save(state, 2)
        fresh = Extra()
        assert checkpoints.resume(state_at(0, sensor=fresh)) is not None
        assert fresh.restored == {"rank": dist.get_rank()}
    return error


def one_rank_raises_in_resume(root: str, failing_rank: int) -> tuple[str, str]:
    """An extra can't take its state on one rank: all raise, nothing is set aside, the next resume works."""

    class Refusing(Extra):
        failing = False
        refusing = dist.get_rank() == failing_rank

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.refusing:
                raise RuntimeError("sensor is gone")
            super().load_state_dict(state)

    extra = Refusing()
    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state_at(1), 1)
        checkpoints.save(state_at(2, sensor=extra), 2)
        state = state_at(0, sensor=extra)
        error = failure(lambda: checkpoints.resume(state))
        assert listing(root) == ["step-00000001", "step-00000002"]
        extra.refusing = False
        report = checkpoints.resume(state)
        assert report is not None
        assert report.step == 2
    return error


def refused_states(root: str) -> dict[str, tuple[str, str]]:
    """States that can't be saved, refused before a directory is made."""
    found = {}
    with sw.Checkpointer(root) as checkpoints:
        state = state_at(1, odd={"inner": [1, object()]})
        found["unserializable"] = failure(lambda: checkpoints.save(state, 1))
        state = state_at(1)
        state.dataloader = torch.utils.data.DataLoader([1, 2])  # type: ignore[arg-type]
        found["loader"] = failure(lambda: checkpoints.save(state, 1))
        state = state_at(1)
        found["step differs"] = failure(lambda: checkpoints.save(state, 1 + dist.get_rank()))
        model = Small(plain=True)
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            ignored_params={model.temperature},
        )
        with torch.no_grad():
            model.temperature += dist.get_rank()
        plain = sw.TrainState(model=model)
        found["plain parameter"] = failure(lambda: checkpoints.save(plain, 1))
        strange = sw.TrainState(model=state.model, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
        found["strange optimizer"] = failure(lambda: checkpoints.save(strange, 1))
        flat = sw.TrainState(model=state.model, optimizer=torch.optim.LBFGS(state.model.parameters()))  # type: ignore[union-attr]
        found["flat optimizer"] = failure(lambda: checkpoints.save(flat, 1))
        barrier()
        assert listing(root) == []
        with torch.no_grad():
            model.temperature.fill_(2.5)
        checkpoints.save(plain, 1)
        model.temperature.data.zero_()
        assert checkpoints.resume(plain) is not None
        assert model.temperature.tolist() == [2.5] * 3
    return found


def buffers_per_rank(root: str, resume_only: bool) -> list[Any]:
    """Running statistics that differ between ranks come back to each rank."""
    state = state_at(1)
    with torch.no_grad():
        state.model.running_mean.fill_(10 + dist.get_rank())
    with sw.Checkpointer(root) as checkpoints:
        if not resume_only:
            checkpoints.save(state, 1)
        fresh = state_at(0)
        report = checkpoints.resume(fresh)
        assert report is not None
        assert report.step == 1
    return [fresh.model.running_mean.tolist(), int(fresh.model.count), report.documents]


def slow_rank_leaves_nothing(root: str) -> tuple[str, str]:
    """Rank 0 fails at once while rank 1 is still about to write: what it writes late is not left behind."""
    from shardwise.checkpoint import save as module

    own = module.write_slices

    def write(path: str, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            raise OSError(errno.EIO, "broken")
        time.sleep(0.5)
        return own(path, *args, **kwargs)

    with sw.Checkpointer(root) as checkpoints:
        checkpoints.save(state_at(1), 1)
        module.write_slices = write
        try:
            error = failure(lambda: checkpoints.save(state_at(2), 2))
        finally:
            module.write_slices = own
        _check_only_step_1(root, checkpoints)
    return error


def hint_can_not_be_written(root: str) -> list[str]:
    """``latest`` is for people: a save that published its step has not failed because of it."""
    with sw.Checkpointer(root) as checkpoints:
        on_first(lambda: Path(root, "latest").mkdir())
        with warnings_logged() as texts:
            checkpoints.save(state_at(1), 1)
        barrier()
        assert listing(root) == ["step-00000001"]
        state = state_at(0)
        assert checkpoints.resume(state) is not None
    return texts


# ------------------------------------------------------------------------------------------------ verify


def save_for_verify(path: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """A checkpoint on a mesh of ``shape`` (two axes: HSDP), with what its payload should add up to."""
    model = Small(33)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = sw.TrainState(model=model, optimizer=optimizer)
    set_values(state, 3)
    sw.save(state, path, step=3)
    nbytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    moments = sum(2 * 4 * p.numel() for p in model.parameters())
    return {"model": nbytes, "optimizer": moments + 4 * len(list(model.parameters()))}


def save_large(path: str, mebibytes: int) -> None:
    model = nn.Linear(mebibytes * MIB // 4 // 64, 64, bias=False)
    sw.save(sw.TrainState(model=model), path)


def saves_to_paths_of_its_own(root: str) -> str:
    """Each rank made up a name, say one with the time in it. The error that it gets."""
    try:
        sw.save(state_at(1), f"{root}/run-{dist.get_rank()}")
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"
