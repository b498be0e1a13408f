"""What the ranks run in the tests of the cases."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.errors import RankError, ShardwiseError
from shardwise.names import canonical_name, named_tensors
from shardwise.tensors.live import reshard
from tests.harness.models import Mixed, Plain, fill_with_noise
from tests.integrations._accelerate_fns import accelerator_with
from tests.loading._load_fns import (
    assert_same_whole,
    bits,
    finite_reference,
    forward,
    local,
    no_payload,
    nothing_else_changes,
    ordinary_model,
    tensors_of,
    whole,
)

MIB = 1024**2


def mesh_of(*shape: int) -> DeviceMesh:
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def train_step(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """One step of SGD; returns the loss before it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(*inputs).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_close_whole(model: nn.Module, ordinary: nn.Module) -> None:
    found = {canonical_name(n): t for n, t in tensors_of(model).items()}
    for name, tensor in tensors_of(ordinary).items():
        torch.testing.assert_close(whole(found[name]).detach(), tensor.detach(), msg=name)


# ----------------------------------------------------------------------------------------------------
# 1: any module, wrapped in any way


def mixed_reference(blocks: int = 3) -> Mixed:
    torch.manual_seed(3)
    model = Mixed(blocks=blocks)
    fill_with_noise(model)
    return model


def wrapped(model: Mixed, how: str) -> nn.Module:
    """The ways in which names and classes change before a model is loaded."""
    if how == "compiled blocks":
        model.blocks = nn.ModuleList(torch.compile(b, backend="eager") for b in model.blocks)
    elif how == "checkpointed blocks":
        model.blocks = nn.ModuleList(checkpoint_wrapper(b) for b in model.blocks)
    elif how == "both":
        model.blocks = nn.ModuleList(
            torch.compile(checkpoint_wrapper(b), backend="eager") for b in model.blocks
        )
    elif how == "compiled in place":
        model.compile(backend="eager")
    elif how == "compiled around":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    return model


def loads_however_wrapped(file: str, run: tuple[str, ...]) -> dict[str, list[str]]:
    """Load into every kind of wrapped module; those in ``run`` also train a step like the ordinary one."""
    names = {}
    for how in (
        "plain",
        "compiled blocks",
        "checkpointed blocks",
        "both",
        "compiled in place",
        "compiled around",
    ):
        with sw.meta_init():
            model = wrapped(Mixed(blocks=3), how)
        sw.shard(model, mesh_of(), sw.ShardPolicy(exclude=("gate",)))
        report = sw.load(model, file, allow_plain=("gate",))
        ordinary = mixed_reference()
        kinds = {canonical_name(n): isinstance(p, DTensor) for n, p in model.named_parameters()}
        assert not kinds.pop("gate")
        assert all(kinds.values())
        assert report.tensors == len(ordinary.state_dict())
        found = {t.name: whole(t.tensor) for t in named_tensors(model)}
        expected = {t.name: t.tensor for t in named_tensors(ordinary)}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(bits(found[name]), bits(tensor)), (how, name)
        if how in run:
            x = torch.linspace(-1, 1, 16).reshape(2, 8)
            with warnings.catch_warnings():
                # torch's: its compiler looks at .grad of FSDP2's gathered parameters.
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                torch.testing.assert_close(train_step(model, x), train_step(ordinary, x))
            reshard(model.modules())
            assert_close_whole(model, ordinary)
        names[how] = [n for n, _ in model.named_parameters()]
    return names


# ----------------------------------------------------------------------------------------------------
# 2: own bytes, bounded memory, nothing initialized for nothing


class _RandomDraws(TorchDispatchMode):
    """Elements that random operations write on real devices."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, torch.Tensor):
            self.numel += 0 if found.is_meta else found.numel()
        return found


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def bytes_through_reads() -> int:
    """Bytes that this process has asked of read calls, as the kernel counts them."""
    (line,) = [v for v in Path("/proc/self/io").read_text().splitlines() if v.startswith("rchar:")]
    return int(line.split()[1])


class AnonymousPeak(threading.Thread):
    """Looks at anonymous memory every few milliseconds until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.003):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return max(self.peak_bytes, anonymous_bytes())


def cost_of_a_load(small: str, large: str, shape: tuple[int, ...]) -> dict[str, int]:
    """What loading ``large`` costs this rank, after ``small`` has warmed up what is only paid once."""
    mesh = mesh_of(*shape)
    sw.load_pretrained(small, mesh)
    dist.barrier()
    before, read = anonymous_bytes(), bytes_through_reads()
    peak = AnonymousPeak()
    peak.start()
    with nothing_else_changes(), _RandomDraws() as draws:
        model, report = sw.load_pretrained(large, mesh, return_report=True)
    peak_bytes = peak.stop() - before
    read = bytes_through_reads() - read
    held = sum(local(p).nbytes for p in model.parameters())
    assert report.local_bytes == held
    return {
        "model": report.model_bytes,
        "shard": held,
        "peak": peak_bytes,
        "after": anonymous_bytes() - before,
        "reported": report.bytes_read,
        "read": read,
        "staging": report.staging_peak_bytes,
        "drawn": draws.numel,
    }


@contextmanager
def efficient_loading() -> Iterator[None]:
    """What ``accelerate launch`` sets for a YAML with ``fsdp_cpu_ram_efficient_loading: true``."""
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(names, "true"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cost_with_accelerate(small: str, large: str) -> dict[str, int]:
    """What a script under Accelerate costs this rank from its first line to its first step, which it then takes.

    ``small`` has been through all of it before, so that only what belongs to ``large`` is counted.
    """
    from shardwise.integrations import accelerate as swa

    def script(path: str) -> dict[str, int]:
        before, peak = anonymous_bytes(), AnonymousPeak()
        peak.start()
        wrap = {"transformer_cls_names_to_wrap": ["Qwen3MoeDecoderLayer"]}
        with efficient_loading(), accelerator_with(plugin=wrap) as accelerator:
            assert accelerator.state.fsdp_plugin.cpu_ram_efficient_loading
            rng = torch.get_rng_state()
            with _RandomDraws() as draws:
                model, report = swa.load_pretrained(accelerator, path, return_report=True)
                optimizer = torch.optim.AdamW(model.parameters())
                model, optimizer = swa.prepare(accelerator, model, optimizer)
            assert torch.equal(rng, torch.get_rng_state())
            ids = torch.arange(8)[None] + 3
            peak_bytes, held = peak.stop() - before, anonymous_bytes() - before
            shard = sum(local(p).nbytes for p in model.parameters())
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            assert model(input_ids=ids, labels=ids).loss < loss
        return {
            "model": report.model_bytes,
            "shard": shard,
            "peak": peak_bytes,
            "held": held,
            "drawn": draws.numel,
        }

    script(small)
    dist.barrier()
    return script(large)


# ----------------------------------------------------------------------------------------------------
# 7: empty shards


class Experts(nn.Module):
    """Two experts in one tensor."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width))

    def forward(self, x: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("bd,edf->bef", x, self.weight) * routing[..., None]).sum(1)


class Scarce(nn.Module):
    """Fewer experts, rows and layers' outputs than ranks; one parameter has no elements at all."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 2), Experts(2, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        self.nothing = nn.Parameter(torch.zeros(0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.experts(x, self.gate(x).softmax(-1)) + self.nothing.sum()
        return self.head(self.norm(x))


def scarce_reference() -> Scarce:
    torch.manual_seed(5)
    model = Scarce()
    fill_with_noise(model)
    return model


def empty_shards(file: str, directory: str, shape: tuple[int, ...]) -> list[str]:
    """Load, train, save, load again; returns the parameters of which this rank holds nothing."""
    with sw.meta_init():
        model = Scarce()
    sw.shard(model, mesh_of(*shape))
    sw.load(model, file)
    ordinary = scarce_reference()
    assert_same_whole(model, ordinary)
    empty = [n for n, p in model.named_parameters() if local(p).numel() == 0]
    x = torch.linspace(-1, 1, 18).reshape(3, 6)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, ordinary)]
    for _ in range(2):
        losses = []
        for each, optimizer in zip((model, ordinary), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(each(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
    assert_close_whole(model, ordinary)
    sw.save(sw.TrainState(model=model, optimizer=optimizers[0]), directory)
    with sw.meta_init():
        again = Scarce()
    sw.shard(again, mesh_of(*shape))
    state = sw.TrainState(model=again, optimizer=torch.optim.AdamW(again.parameters(), lr=0.05))
    sw.restore(state, directory)
    for name, tensor in tensors_of(again).items():
        assert torch.equal(bits(local(tensor)), bits(local(tensors_of(model)[name]))), name
    return empty


# ----------------------------------------------------------------------------------------------------
# 8: ties


def ties_stay(file: str, how: str) -> None:
    """On meta, after the load, after training: one parameter under both names, and trained as one."""
    with sw.meta_init():
        model = Plain()
    assert model.head.weight is model.embed.weight
    mesh = mesh_of()
    if how == "shard":
        sw.shard(model, mesh, sw.ShardPolicy(exclude=("flags", "temperature")))
    elif how == "one group":
        plain = {model.flags, model.temperature}
        fully_shard([model.embed, model.head], mesh=mesh)  # type: ignore[arg-type]
        fully_shard(model.adapter, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=plain)
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.is_meta
    sw.load(model, file)
    assert model.head.weight is model.embed.weight
    ordinary = finite_reference()
    assert_same_whole(model, ordinary)
    ids = torch.arange(10).reshape(2, 5)
    for _ in range(2):
        torch.testing.assert_close(train_step(model, ids), train_step(ordinary, ids))
    reshard(model.modules())
    assert model.head.weight is model.embed.weight
    assert model.blocks[0].scale is model.shared_scale
    assert_close_whole(model, ordinary)


def tied_transformers_model(directory: str) -> None:
    ordinary = ordinary_model(directory)
    model, report = sw.load_pretrained(directory, mesh_of(), return_report=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report.tensors == len(list(ordinary.parameters()))
    ids = torch.arange(12).reshape(2, 6)
    for each in (model, ordinary):
        each.train()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    reshard(model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_close_whole(model, ordinary)


# ----------------------------------------------------------------------------------------------------
# 9: non-persistent buffers


def buffers_are_right(directories: list[str]) -> dict[str, list[str]]:
    """Names of the non-persistent buffers by directory; all equal ordinary construction, and so does forward."""
    found = {}
    for directory in directories:
        ordinary = ordinary_model(directory)
        model = sw.load_pretrained(directory, mesh_of())
        persistent = set(ordinary.state_dict())
        names = [n for n, _ in ordinary.named_buffers() if n not in persistent]
        mine, theirs = dict(model.named_buffers()), dict(ordinary.named_buffers())
        for name in names:
            assert mine[name].dtype is theirs[name].dtype, name
            assert torch.equal(bits(mine[name]), bits(theirs[name])), name
        torch.testing.assert_close(forward(model), forward(ordinary))
        found[Path(directory).name] = names
    return found


class Derived(nn.Module):
    """A buffer that nothing but a parameter's values can give, which no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("norm", self.lin.weight.detach().norm(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) / self.norm


def buffer_without_value(file: str, memory: bool) -> str:
    with sw.meta_init():
        model = Derived()
    sw.shard(model, mesh_of())
    if memory:
        model.to_empty(device="cpu")  # the buffer is no longer on meta, and no better for it
    try:
        with no_payload():
            sw.load(model, file)
    except ShardwiseError as error:
        return str(error)
    raise AssertionError("a buffer without a value went unnoticed")


def buffer_filled_by_hand(file: str) -> float:
    with sw.meta_init():
        model = Derived()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.norm.fill_(2.5)
    sw.load(sw.shard(model, mesh_of()), file)
    return float(model.norm)


# ----------------------------------------------------------------------------------------------------
# 12: incomplete and ambiguous sources


def outcomes(directories: list[str]) -> list[str]:
    """Texts of the errors, or what the report says of ignored files, and how the values compare."""
    found = []
    for directory in directories:
        try:
            with no_payload():
                sw.load_pretrained(directory, mesh_of())
        except ShardwiseError as error:
            found.append(f"{type(error).__name__}: {error}")
            continue
        raise AssertionError(f"no error for {directory}")
    return found


def ignored_files(directory: str, reference: str) -> tuple[str, ...]:
    """A file outside the index is reported and changes nothing."""
    model, report = sw.load_pretrained(directory, mesh_of(), return_report=True)
    assert_same_whole(model, ordinary_model(reference))
    return report.ignored_files


# ----------------------------------------------------------------------------------------------------
# 19: one rank fails


@contextmanager
def failing_reads(code: int) -> Iterator[None]:
    """Reads of payload fail with this error number, after the first."""
    kept, calls = os.preadv, 0

    def preadv(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(code, os.strerror(code))
        return kept(*arguments)

    os.preadv = preadv
    try:
        yield
    finally:
        os.preadv = kept


def one_rank_fails(shared: str, private: str, how: str) -> dict[str, Any]:
    """Rank 1 can't read what the other ranks read. Returns what each rank raises, and after how many seconds."""
    mine = dist.get_rank() == 1
    with sw.meta_init():
        model = Plain()
    policy = sw.ShardPolicy(exclude=("flags", "temperature"))
    sw.shard(model, mesh_of(), policy)
    source: Any = shared
    if mine and how == "truncated":  # after its header was read, as on a file system that lost blocks
        source = open_catalog(private)
        file = Path(private, "model.safetensors")
        os.truncate(file, file.stat().st_size // 2)
    elif mine and how == "unlinked":
        source = open_catalog(private)
        Path(private, "model.safetensors").unlink()
    try:
        io = sw.IOOptions(strategy="own")  # else the other ranks read for it
        with failing_reads(errno.EIO) if mine and how == "unreadable" else nullcontext():
            sw.load(model, source, io=io)
    except RankError as error:
        found = {"text": str(error), "causes": error.causes}
    else:
        raise AssertionError("no error")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    sw.load(model, shared)  # the same model, the same group
    assert_same_whole(model, finite_reference())
    return found
