"""Who reads a source: whatever the strategy, shards have the same bits, each range is read as often as it says, and failures are shared."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.records import packed_catalog, unpacked_catalog
from shardwise.errors import RankError
from shardwise.loading import strategies as strategy
from shardwise.loading.strategies import Facts
from tests.harness import models
from tests.harness.launch import Launch
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool

MIB = 1024**2
SHARED = ("node", "once")


def locals_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def options(strategy: Any, staging_bytes: int = MIB, **more: Any) -> sw.IOOptions:
    return sw.IOOptions(strategy=strategy, staging_bytes=staging_bytes, **more)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = locals_of(found), locals_of(expected)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def totals(report: sw.reports.LoadReport) -> tuple[int, int]:
    """Bytes read and bytes sent, of all ranks."""
    both = torch.tensor([report.bytes_read, report.bytes_sent])
    dist.all_reduce(both)
    return int(both[0]), int(both[1])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for kind in ("gpt2", "qwen3-moe"):
        models.write_hub_directory(kind, root / kind, torch.float32)
    return root


@on_ranks(4)
def test_shards_are_those_that_each_rank_reads_itself(hub: Path) -> None:
    """Models with conversions (experts), transposed and cut tensors (gpt2), casts, under FSDP and HSDP."""
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    replicated = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for kind, mesh, dtype in (("gpt2", flat, "auto"), ("qwen3-moe", replicated, "bfloat16")):
        expected, report = sw.load_pretrained(
            hub / kind, mesh, dtype=dtype, io=options("own"), return_report=True
        )
        assert report.strategy == "own: asked for"
        for chosen in SHARED:
            found, report = sw.load_pretrained(
                hub / kind, mesh, dtype=dtype, io=options(chosen), return_report=True
            )
            assert report.strategy == f"{chosen}: asked for"
            assert report.staging_peak_bytes <= 2 * MIB
            assert_same(found, expected)
            read, _ = totals(report)
            assert read <= 1.02 * open_catalog(hub / kind).nbytes


@on_ranks(2, 3)
def test_columns_and_ties_and_scalars(tmp_path: Path) -> None:
    """Shards of dim 1 cut every row; second copies of a tie are compared; tensors of any rank and dtype."""
    torch.manual_seed(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(300, 700, bias=False)
            self.head = nn.Linear(300, 700, bias=False)
            self.head.weight = self.wide.weight
            self.deep = nn.Parameter(torch.randn(3, 6, 7, 11))
            self.register_buffer("count", torch.tensor(7))
            self.register_buffer("flags", torch.rand(13) > 0.5)
            self.register_buffer("codes", torch.arange(-5, 6, dtype=torch.int8))

    reference = Net()
    state = {name: t.detach().clone() for name, t in reference.state_dict().items()}
    if dist.get_rank() == 0:
        save_file(state, tmp_path / "model.safetensors")
    dist.barrier()
    loaded = []
    for chosen in ("own", *SHARED):
        with sw.meta_init():
            model = Net()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
        report = sw.load(model, tmp_path, io=options(chosen))
        read, sent = totals(report)
        twice = state["wide.weight"].nbytes  # a tie is stored twice, and the second copy compared
        if chosen == "node":  # each rank compares by itself
            read -= (dist.get_world_size() - 1) * twice
        if chosen != "own":
            assert read <= 1.02 * sum(t.nbytes for t in state.values())
        if chosen == "once":
            whole = sum(b.nbytes for b in reference.buffers()) * dist.get_world_size()
            assert 0 < sent <= 1.02 * (sum(p.nbytes for p in reference.parameters()) + twice + whole)
        loaded.append(model)
    for model in loaded[1:]:
        assert_same(model, loaded[0])
    with torch.no_grad():
        full = loaded[-1].wide.weight
        assert isinstance(full, DTensor)
        assert torch.equal(full.full_tensor(), reference.wide.weight)


@on_ranks(2, 3)
def test_dtypes_of_other_sizes_one_after_the_other(tmp_path: Path) -> None:
    """What several ranks send lies end to end: an odd number of bf16 leaves the next fp32 off its alignment."""
    torch.manual_seed(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.randn(70_001).bfloat16())
            self.register_buffer("b", torch.randn(100_000))

    reference = Net()
    if dist.get_rank() == 0:
        for name, tensor in reference.state_dict().items():
            save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    dist.barrier()
    for chosen in SHARED:
        with sw.meta_init():
            model = Net()
        sw.load(model, tmp_path, io=options(chosen))
        assert torch.equal(model.a, reference.a)
        assert torch.equal(model.b, reference.b)


@on_ranks(2)
def test_short_runs_are_read_once_per_host(tmp_path: Path) -> None:
    state = {"weight": torch.randn(4200, 2048).to(torch.bfloat16)}
    if dist.get_rank() == 0:
        models.write_state(state, tmp_path)
    dist.barrier()
    with sw.meta_init():
        model = nn.Linear(2048, 4200, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(1))
    report = sw.load(model, tmp_path)
    assert report.strategy == "node: shards are stored in short runs"
    assert totals(report) == (state["weight"].nbytes, 0)
    assert isinstance(model.weight, DTensor)
    assert torch.equal(model.weight.full_tensor(), state["weight"])


@on_ranks(2)
def test_ranks_that_can_not_share_memory_read_for_themselves(tmp_path: Path) -> None:
    """As where a hardened system hides the descriptors of other processes. Only a caller who asked hears an error."""
    state = {"weight": torch.randn(4200, 2048).to(torch.bfloat16)}
    if dist.get_rank() == 0:
        models.write_state(state, tmp_path)
    dist.barrier()
    for chosen in ("auto", "node"):
        with sw.meta_init():
            model = nn.Linear(2048, 4200, bias=False, dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(1))
        processes: list[int] = [0, 0]
        dist.all_gather_object(processes, os.getpid())
        with unseen(Path(f"/proc/{processes[0]}/fd"), dist.get_rank() == 1):
            if chosen == "node":
                with pytest.raises(sw.errors.SourceError, match=r"rank 1: .*No such file or directory"):
                    sw.load(model, tmp_path, io=options(chosen))
                continue
            report = sw.load(model, tmp_path, io=options(chosen))
        assert report.strategy.startswith("own: ranks can't share memory (rank 1: ")
        assert isinstance(model.weight, DTensor)
        assert torch.equal(model.weight.full_tensor(), state["weight"])


@on_ranks(3)
def test_a_tie_whose_copies_differ_is_refused_by_every_strategy(tmp_path: Path) -> None:
    models.write_state({"a.weight": torch.ones(9, 4), "b.weight": torch.zeros(9, 4)}, tmp_path)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 9, bias=False)
            self.b = nn.Linear(4, 9, bias=False)
            self.b.weight = self.a.weight

    dist.barrier()
    for chosen in ("own", *SHARED):
        with sw.meta_init():
            model = Tied()
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        with pytest.raises(
            (RankError, sw.errors.PlanError), match=r"a second copy of 'a\.weight' that differs"
        ):
            sw.load(model, tmp_path, io=options(chosen))


@on_ranks(3)
def test_a_source_that_only_one_rank_sees_loads_on_all(tmp_path: Path) -> None:
    rank = dist.get_rank()
    reference = models.Plain()
    models.fill_with_noise(reference)
    shapes = models.state_of(reference)
    if rank == 2:
        models.write_state(shapes, tmp_path / "seen")
    dist.barrier()
    mesh = init_device_mesh("cpu", (3,))
    policy = sw.ShardPolicy(exclude=("flags", "temperature"))
    for chosen in ("auto", "once"):
        with sw.meta_init():
            model = models.Plain()
        sw.shard(model, mesh, policy)
        with unseen(tmp_path / "seen", rank != 2):
            report = sw.load(model, tmp_path / "seen", io=options(chosen))
        assert report.strategy == "once: 2 of 3 ranks can't see the files"
        assert (report.bytes_read > 0) is (rank == 2) is (report.bytes_sent > 0)
        full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
        expected = reference.state_dict()
        assert not [name for name in expected if not torch.equal(full[name], expected[name])]
    with sw.meta_init():
        model = models.Plain()
    sw.shard(model, mesh, policy)
    with unseen(tmp_path / "seen", rank != 2), pytest.raises(RankError) as caught:
        sw.load(model, tmp_path / "seen", io=options("node"))
    assert sorted(caught.value.causes) == [0, 1]
    with pytest.raises(sw.errors.SourceError, match="no such file or directory"):
        sw.load(model, tmp_path / "nowhere")


@on_ranks(2)
def test_a_model_whose_directory_only_one_rank_has(hub: Path, tmp_path: Path) -> None:
    """Config and generation config travel, too; also of a checkpoint, and with a model's conversions."""
    mesh = init_device_mesh("cpu", (2,))
    step = tmp_path / "step"
    model = sw.load_pretrained(hub / "qwen3-moe", mesh)
    sw.save(sw.TrainState(model=model), step)
    for path in (hub / "qwen3-moe", step):
        expected = sw.load_pretrained(path, mesh)
        with unseen(path, dist.get_rank() == 1):
            found, report = sw.load_pretrained(path, mesh, io=options("auto"), return_report=True)
            if dist.get_rank() == 1:
                assert not os.path.lexists(path)
        assert report.strategy == "once: 1 of 2 ranks can't see the files"
        assert found.config.to_dict() == expected.config.to_dict()
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()
        assert_same(found, expected)


@contextmanager
def unseen(path: Path, hidden: bool) -> Iterator[None]:
    """This rank's system calls find no file below ``path``."""
    if not hidden:
        yield
        return
    kept = {name: getattr(os, name) for name in ("stat", "lstat", "open")}

    def without(call: Any) -> Any:
        def refuse(name: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(name, (str, os.PathLike)) and os.fspath(name).startswith(str(path)):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(name))
            return call(name, *args, **kwargs)

        return refuse

    for name, call in kept.items():
        setattr(os, name, without(call))
    try:
        yield
    finally:
        for name, call in kept.items():
            setattr(os, name, call)


@on_ranks(3)
def test_a_reader_that_fails_is_one_error_everywhere(tmp_path: Path) -> None:
    """In the middle of the reads, on rank 1; the model and the group stay usable."""
    torch.manual_seed(1)
    state = {"weight": torch.randn(3000, 400)}
    if dist.get_rank() == 0:
        models.write_state(state, tmp_path)
    dist.barrier()
    mesh = init_device_mesh("cpu", (3,))
    for chosen in ("own", *SHARED):
        with sw.meta_init():
            model = nn.Linear(400, 3000, bias=False)
        fully_shard(model, mesh=mesh)
        with failing_reads(dist.get_rank() == 1, after=2), pytest.raises(RankError) as caught:
            sw.load(model, tmp_path, io=options(chosen))
        assert list(caught.value.causes) == [1]
        assert "Input/output error" in str(caught.value)
        texts: list[Any] = [None] * 3
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1
        sw.load(model, tmp_path, io=options(chosen))
        found = model.weight
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), state["weight"])


@contextmanager
def failing_reads(fails: bool, after: int) -> Iterator[None]:
    kept, calls = os.preadv, 0

    def preadv(*arguments: Any) -> int:
        nonlocal calls
        calls += arguments[2] > 0
        if fails and calls > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        # Several reads of each rank, also where it reads its whole shard at once.
        return kept(arguments[0], [arguments[1][0][: 128 * 1024]], arguments[2])

    os.preadv = preadv  # type: ignore[assignment]
    try:
        yield
    finally:
        os.preadv = kept


def dies_in_mid_read(path: str, chosen: str) -> str:
    """Rank 1 is killed in the middle of its reads."""
    with sw.meta_init():
        model = nn.Linear(400, 3000, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    if dist.get_rank() == 1:
        kept, calls = os.preadv, 0

        def preadv(*arguments: Any) -> int:
            nonlocal calls
            calls += 1
            if calls > 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return kept(*arguments)

        os.preadv = preadv  # type: ignore[assignment]
    try:
        sw.load(model, path, io=options(chosen, timeout_s=3.0))
    except RankError as error:
        return json.dumps([sorted(error.causes), list(error.missing)])
    return "no error"


@pytest.mark.processes
@pytest.mark.parametrize("chosen", SHARED)
def test_a_reader_that_is_killed_is_named(tmp_path: Path, chosen: str) -> None:
    models.write_state({"weight": torch.randn(3000, 400)}, tmp_path)
    with Launch(3, dies_in_mid_read, str(tmp_path), chosen) as job:
        job.wait(60)
        for rank in (0, 2):
            causes, missing = json.loads(job.result(rank))
            assert missing == [1], (causes, missing)


@pytest.mark.ranks
def test_files_that_differ_between_ranks_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    models.write_state({"weight": torch.randn(300, 40)}, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with open(tmp_path / "b" / "model.safetensors", "ab") as file:
        file.write(b"more")
    for found in ranks.run_ranks(2, load_of_rank, [str(tmp_path / "a"), str(tmp_path / "b")]):
        assert "different names or sizes than rank 0's" in found


def load_of_rank(paths: list[str]) -> str:
    with sw.meta_init():
        model = nn.Linear(40, 300, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        sw.load(model, open_catalog(paths[0]) if dist.get_rank() == 0 else other(paths), io=options("once"))
    except RankError as error:
        return str(error)
    return "no error"


def other(paths: list[str]) -> Any:
    """A catalog that is the first one's, with files of the second."""
    content = packed_catalog(open_catalog(paths[0])).decode().replace(paths[0], paths[1])
    return unpacked_catalog(content.encode())


def facts(**changed: Any) -> dict[str, Any]:
    from dataclasses import asdict

    plain = Facts(plan="p", words="a model", host="h", files="f", network=False, read_bytes=50, short_bytes=0)
    return {**asdict(plain), **changed}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([facts()], "own: one rank"),
        ([facts(), facts()], "own: the files are on local disks"),
        ([facts(network=True), facts(network=True)], "own: ranks need different bytes"),
        (
            [facts(network=True, read_bytes=100)] * 2,
            "node: ranks of one host would read the source 2.0 times from a network file system",
        ),
        (
            [facts(network=True, read_bytes=100, host=host) for host in "ab"],
            "once: ranks of 2 hosts would read the source 2.0 times from a network file system",
        ),
        ([facts(short_bytes=9 * MIB)] * 2, "node: shards are stored in short runs"),
        ([facts(short_bytes=9 * MIB, host=host) for host in "ab"], "own: the files are on local disks"),
        ([facts(short_bytes=7 * MIB)] * 2, "own: the files are on local disks"),
        ([facts(), facts(files=None)], "once: 1 of 2 ranks can't see the files"),
        ([facts(files=None), facts(files=None)], "own: the files are on local disks"),
    ],
)
def test_the_choice_and_its_reason(told: list[dict[str, Any]], expected: str) -> None:
    found = strategy.Choice(**strategy.choose("plan the load", "auto", 100, told))
    assert found.describe() == expected


def test_ranks_that_would_load_something_else_are_named() -> None:
    with pytest.raises(RankError, match="rank 1: differs from rank 0: has a box; rank 0 has a model"):
        strategy.choose("plan the load", "auto", 100, [facts(), facts(plan="q", words="a box")])


def test_a_catalog_travels_whole(hub: Path, tmp_path: Path) -> None:
    model = models.Plain()
    sw.save(sw.TrainState(model=model), tmp_path / "step")
    for path in (hub / "gpt2", tmp_path / "step"):
        catalog = open_catalog(path)
        found = unpacked_catalog(packed_catalog(catalog))
        assert (found.kind, found.root, found.files) == (catalog.kind, catalog.root, catalog.files)
        assert (found.digests, found.metadata) == (catalog.digests, catalog.metadata)
        assert {n: (t.dtype, t.shape, tuple(t.chunks)) for n, t in found.tensors.items()} == {
            n: (t.dtype, t.shape, tuple(t.chunks)) for n, t in catalog.tensors.items()
        }


def test_network_file_systems_are_known_by_their_type(tmp_path: Path) -> None:
    for kind in (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "fuse.gcsfuse",
        "fuse",
        "virtiofs",
        "wekafs",
        "gfs2",
    ):
        assert strategy._NETWORK.match(f"{kind} server:/ rw"), kind
    for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "fusectl"):
        assert not strategy._NETWORK.match(f"{kind} nfs rw"), kind
    assert strategy.on_network(str(tmp_path)) is False
    assert strategy.on_network(str(tmp_path / "nowhere")) is False
