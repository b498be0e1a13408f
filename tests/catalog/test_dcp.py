"""Checkpoints that torch.distributed.checkpoint wrote: read by byte ranges, and never unpickled."""

from __future__ import annotations

import enum
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import shardwise as sw
from shardwise.catalog.dcp import read_dcp
from shardwise.catalog.open import open_catalog
from shardwise.errors import FormatError, IntegrityError, SourceError, StateError
from tests.catalog import _dcp_fns as fns
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, optimizer and more, saved by two ranks."""
    folder = tmp_path_factory.mktemp("dcp") / "checkpoint"
    ranks.run_ranks(2, fns.save_with_torch, str(folder), "nested", "float32")
    return folder


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["bfloat16", *nightly("float32")])
@pytest.mark.parametrize("kind", ["nested", "app", "flat"])
@pytest.mark.parametrize(("before", "now"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.nightly)])
def test_torch_saves_and_we_load(
    ranks: RankPool, tmp_path: Path, kind: str, dtype: str, before: int, now: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    (expected, *_) = ranks.run_ranks(before, fns.save_with_torch, folder, kind, dtype)
    loaded = ranks.run_ranks(now, fns.load_with_us, folder, dtype)
    for found, _ in loaded:
        assert_same(found, expected)
    nbytes = sum(t.numel() * t.element_size() for t in expected.values())
    # What is plain is read by every rank; the rest once.
    plain = sum(
        t.numel() * t.element_size()
        for n, t in expected.items()
        if n in ("gate", "steps") or n.endswith(".seen")
    )
    assert sum(read for _, read in loaded) <= nbytes + (now - 1) * plain


def test_other_items_are_listed_and_not_opened(saved: Path) -> None:
    found = read_dcp(saved)
    assert "step" in found.objects
    assert any(name.startswith("optim.param_groups") for name in found.objects)
    assert found.catalog.tensors["optim.state.head.weight.exp_avg"].shape == (3, 8)
    assert found.paths["model.head.weight"] == ("model", "head.weight")
    where = found.objects["step"]
    with open(where.path, "rb") as stream:
        stream.seek(where.offset_bytes)
        content = stream.read(where.nbytes)
    (saved / "step.pt").write_bytes(content)
    assert torch.load(saved / "step.pt", weights_only=True) == 7
    (saved / "step.pt").unlink()


class Evil:
    """Calls something when it is unpickled."""

    def __init__(self, called: Any, *args: Any) -> None:
        self.called, self.args = called, args

    def __reduce__(self) -> Any:
        return self.called, self.args


def copy_of(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # what torch wrote a moment ago


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("where", ["top", "planner_data", "storage_data"])
def test_a_malicious_pickle_is_refused_and_not_run(saved: Path, tmp_path: Path, where: str) -> None:
    folder, mark = copy_of(saved, tmp_path), tmp_path / "was-run"
    evil = Evil(Path.touch, mark)
    if where == "top":
        write_metadata(folder, evil)
    else:
        metadata = metadata_of(folder)
        setattr(metadata, where, {"x": evil})
        write_metadata(folder, metadata)
    with pytest.raises(FormatError, match="rejected: its pickle asks for"):
        read_dcp(folder)
    assert not mark.exists()


class EarlyPickler(pickle.Pickler):
    """Refers to members of an enum as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_written_by_an_early_python_3_11(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path)
    metadata = metadata_of(folder)
    with (folder / ".metadata").open("wb") as stream:
        EarlyPickler(stream).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_dcp(folder).catalog.tensors.keys() == read_dcp(saved).catalog.tensors.keys()

    metadata.planner_data = {"x": Evil(getattr, torch.Size, "__class__")}
    write_metadata(folder, metadata)
    with pytest.raises(FormatError, match="getattr of something other"):
        read_dcp(folder)


def short(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + len(text.encode()).to_bytes(1, "little") + text.encode()


def called(module: str, name: str, mark: str) -> bytes:
    """Opcodes that call ``module.name(mark)``, found as protocol 4 does."""
    found = short(module) + short(name) + pickle.STACK_GLOBAL
    return found + short(mark) + pickle.TUPLE1 + pickle.REDUCE


METADATA = "torch.distributed.checkpoint.metadata"
#: Ways into Python from a pickle, each with the path of a file that it would make.
GADGETS: dict[str, Any] = {
    "os.system": lambda mark: called("posix", "system", f"touch {mark}"),
    "eval": lambda mark: called("builtins", "eval", f"open({mark!r}, 'w')"),
    "exec": lambda mark: called("builtins", "exec", f"open({mark!r}, 'w')"),
    "open": lambda mark: (
        short("builtins") + short("open") + pickle.STACK_GLOBAL + short(mark) + short("w") + b"\x86R"
    ),
    "import": lambda mark: called("builtins", "__import__", "antigravity"),
    "subprocess": lambda mark: called("subprocess", "getoutput", f"touch {mark}"),
    "attrgetter": lambda mark: called("operator", "attrgetter", "__class__"),
    "getattr": lambda mark: called("builtins", "getattr", mark),
    "torch.load": lambda mark: called("torch", "load", mark),
    "torch.hub": lambda mark: called("torch.hub", "load", mark),
    "runpy": lambda mark: called("runpy", "run_path", mark),
    "a name with dots": lambda mark: called(METADATA, "Metadata.__init__.__globals__", mark),
    "dots into os": lambda mark: called(METADATA, "os.system", f"touch {mark}"),
    "the module of a dtype": lambda mark: called("torch.serialization", "os.system", f"touch {mark}"),
    "protocol 0": lambda mark: pickle.GLOBAL + b"posix\nsystem\n" + short(f"touch {mark}") + b"\x85R",
    "INST": lambda mark: pickle.MARK + short(f"touch {mark}") + pickle.INST + b"posix\nsystem\n",
    "OBJ": lambda mark: (
        pickle.MARK + pickle.GLOBAL + b"posix\nsystem\n" + short(f"touch {mark}") + pickle.OBJ
    ),
    "an extension code": lambda mark: pickle.EXT1 + b"\x01",
    "state for a class": lambda mark: (
        short(METADATA)
        + short("Metadata")
        + pickle.STACK_GLOBAL
        + b"}"
        + short("x")
        + b"K\x01s"
        + pickle.BUILD
    ),
    "state for a function": lambda mark: (
        short("torch") + short("Size") + pickle.STACK_GLOBAL + b"}" + short("x") + b"K\x01s" + pickle.BUILD
    ),
}


@pytest.mark.parametrize("inside", ["alone", "in a record", "in torch.save"])
@pytest.mark.parametrize("gadget", GADGETS)
def test_gadgets_are_refused_and_not_run(saved: Path, tmp_path: Path, gadget: str, inside: str) -> None:
    """As the whole description, as state of one of its records, and in the description of a tensor."""
    from shardwise.catalog.torch_files import read_torch_file

    mark = tmp_path / "was-run"
    body = GADGETS[gadget](str(mark))
    if inside == "in a record":
        record = short(METADATA) + short("Metadata") + pickle.STACK_GLOBAL + b")" + pickle.NEWOBJ
        body = record + b"}" + short("state_dict_metadata") + body + b"s" + pickle.BUILD
    content = pickle.PROTO + b"\x04" + body + pickle.STOP
    if inside == "in torch.save":
        torch.save({"w": torch.ones(2)}, tmp_path / "sound.pt")
        with (
            zipfile.ZipFile(tmp_path / "sound.pt") as sound,
            zipfile.ZipFile(tmp_path / "evil.pt", "w") as evil,
        ):
            for name in sound.namelist():
                evil.writestr(name, content if name.endswith("data.pkl") else sound.read(name))
        with pytest.raises(FormatError):
            read_torch_file(tmp_path / "evil.pt")
    else:
        folder = copy_of(saved, tmp_path)
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(FormatError):
            read_dcp(folder)
    assert not mark.exists()


def test_a_malicious_chunk_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    folder, mark = copy_of(saved, tmp_path), tmp_path / "was-run"
    metadata = metadata_of(folder)
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "model.head.weight")
    torch.save(Evil(Path.touch, mark), folder / "evil.distcp")
    info.relative_path, info.offset = "evil.distcp", 0
    info.length = (folder / "evil.distcp").stat().st_size
    metadata.storage_data[index] = info
    write_metadata(folder, metadata)
    with pytest.raises(FormatError, match="asks for"):
        read_dcp(folder)
    assert not mark.exists()


@pytest.mark.parametrize("path", ["../stolen", "/etc/passwd", "a/../../stolen"])
def test_paths_outside_the_directory_are_refused(saved: Path, tmp_path: Path, path: str) -> None:
    folder = copy_of(saved, tmp_path)
    metadata = metadata_of(folder)
    next(iter(metadata.storage_data.values())).relative_path = path
    write_metadata(folder, metadata)
    with pytest.raises(FormatError, match="outside its directory"):
        read_dcp(folder)


def test_damage_is_named(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or directory"):
        fns_catalog(tmp_path / "nowhere")
    folder = copy_of(saved, tmp_path)
    (folder / "__1_0.distcp").write_bytes((saved / "__1_0.distcp").read_bytes()[:-600])
    with pytest.raises(IntegrityError, match="truncated"):
        read_dcp(folder)
    for kind, text in ranks.run_ranks(2, fns.error_of, str(folder)):
        assert kind == "IntegrityError"
        assert "__1_0.distcp" in text
    (folder / "__1_0.distcp").unlink()
    with pytest.raises(IntegrityError, match="lost"):
        read_dcp(folder)
    (folder / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:-40])
    with pytest.raises(FormatError, match="damaged"):
        read_dcp(folder)


def test_a_chunk_of_other_bytes_is_refused(saved: Path, tmp_path: Path) -> None:
    """The elements of a transposed tensor are not row-major, and torch.save keeps its strides."""
    folder = copy_of(saved, tmp_path)
    metadata = metadata_of(folder)
    index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "model.head.weight")
    sizes = next(
        c.sizes for c in metadata.state_dict_metadata["model.head.weight"].chunks if c.offsets == index.offset
    )
    torch.save(torch.randn(tuple(reversed(sizes))).t(), folder / "strided.distcp")
    info.relative_path, info.offset = "strided.distcp", 0
    info.length = (folder / "strided.distcp").stat().st_size
    write_metadata(folder, metadata)
    with pytest.raises(FormatError, match="is not row-major"):
        read_dcp(folder)


@pytest.mark.parametrize("at", [0, 1])
def test_a_chunk_that_is_missing_is_named(saved: Path, tmp_path: Path, at: int) -> None:
    folder = copy_of(saved, tmp_path)
    metadata = metadata_of(folder)
    del metadata.state_dict_metadata["model.blocks.0.up.weight"].chunks[at]
    write_metadata(folder, metadata)
    with pytest.raises(FormatError, match=r"blocks\.0\.up\.weight' (is only partly stored|make shape)"):
        read_dcp(folder)


def fns_catalog(path: Path) -> None:
    from shardwise.catalog.open import open_catalog

    open_catalog(path)


@pytest.mark.parametrize("now", [3, *nightly(2)])
def test_a_run_that_accelerate_began_goes_on_here(ranks: RankPool, tmp_path: Path, now: int) -> None:
    """Accelerate's own checkpoint, with the optimizer and the scheduler: the same losses as its run has."""
    root = str(tmp_path / "state")
    expected = ranks.run_ranks(2, fns.accelerate_trains, root, "SHARDED_STATE_DICT", 3, 6)
    found = ranks.run_ranks(now, fns.goes_on_here, root, 3, 6)
    for rank in found:
        assert not rank["exact"]  # nothing vouches for the RNG and the data
        assert rank["documents"] == ("scheduler",)
        assert rank["tensors"] == (14, 14 * 3)
        assert rank["saved_world_size"] == 2
        assert rank["read"] <= 1.05 * rank["held"]
    if now == 2:
        assert [rank["losses"] for rank in found] == expected
    else:  # other batches a rank: what was restored is the same, what is trained on is not
        assert found[0]["losses"][0] == expected[0][0]


def test_what_is_not_there_is_refused(ranks: RankPool, saved: Path) -> None:
    for found in ranks.run_ranks(2, fns.asks_for_too_much, str(saved)):
        for name in ("scaler", "dataloader", "scheduler"):
            assert found[name].startswith("StateError"), found[name]
            assert "leave" in found[name]


def trained(names: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model, and the state dict of an optimizer that has made a step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=names == "flat")
    return model, get_optimizer_state_dict(model, optimizer, options=options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("names", ["nested", "flat"])
@pytest.mark.parametrize(
    "entries", [("net", "opt"), ("state_dict", "optimizer_0"), ("state.model", "state.optimizers.AdamW")]
)
def test_an_optimizer_is_told_by_its_groups(tmp_path: Path, entries: tuple[str, str], names: str) -> None:
    """Whatever its entry is called: no moment is ever a weight, and it is read with its model."""
    model, of_optimizer = trained(names)
    state: dict[str, Any] = {}
    for entry, content in zip(entries, (model.state_dict(), of_optimizer), strict=True):
        *above, last = entry.split(".")
        place = state
        for part in above:
            place = place.setdefault(part, {})
        place[last] = content
    dcp.save(state | {"note": "kept"}, checkpoint_id=tmp_path / "x", no_dist=True)
    catalog = open_catalog(tmp_path / "x")
    assert catalog.tensors.keys() == {"weight", "bias"}
    report = sw.convert(tmp_path / "x", tmp_path / "out")
    assert (report.tensors, report.optimizer_tensors) == (2, 6)
    assert any(line.startswith("note: ") for line in report.skipped)
    again = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(again.parameters())
    for source in ("x", "out"):
        sw.restore(sw.TrainState(model=again, optimizer=optimizer), tmp_path / source)
        assert torch.equal(again.weight, model.weight)
        assert all(state["exp_avg"].any() for state in optimizer.state.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_entries_of_which_none_is_known_to_be_the_model(tmp_path: Path) -> None:
    model, of_optimizer = trained("nested")
    state = {"actor": model.state_dict(), "ema": torch.nn.Linear(3, 2).state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    for write in (sw.convert, sw.export_hf):
        with pytest.raises(
            StateError, match=r"has tensors in 'actor, ema', and none of them is known to be the model"
        ):
            write(tmp_path / "x", tmp_path / "out")
    again = torch.nn.Linear(3, 2)
    sw.load(again, tmp_path / "x", names=lambda n: n.removeprefix("actor."), allow_unused=("ema.*",))
    assert torch.equal(again.weight, model.weight)
    dcp.save(of_optimizer, checkpoint_id=tmp_path / "optimizer", no_dist=True)
    with pytest.raises(SourceError, match="contains no model: its state dict has an optimizer"):
        open_catalog(tmp_path / "optimizer")


ONE = torch.ones(2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "entry",
    [
        {"opt_muon": {"momentum_buffer": ONE}},
        {"opt_muon": {"w": {"momentum_buffer": ONE}}},
        {"optimizer_state": {"weight": {"exp_avg": ONE, "step": torch.tensor(1.0)}}},
        {"muon": {"weight": {"exp_avg": ONE, "exp_avg_sq": ONE}}},
        {"adam": {"weight.exp_avg": ONE, "weight.max_exp_avg_sq": ONE}},
        {"my_optimizer": {"weight": {"preconditioner": ONE}}},
        {"optim2": {"weight": {"anything": ONE}}},
        {"weight.exp_avg": ONE, "weight.exp_avg_sq": ONE},
    ],
)
def test_states_of_an_optimizer_are_no_model(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Alone they are refused; next to a model they are left out."""
    dcp.save(entry, checkpoint_id=tmp_path / "x", no_dist=True)
    for write in (sw.convert, sw.export_hf):
        with pytest.raises(SourceError, match="contains no model: its state dict has an optimizer"):
            write(tmp_path / "x", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    dcp.save({**entry, "net": {"weight": ONE}}, checkpoint_id=tmp_path / "both", no_dist=True)
    assert open_catalog(tmp_path / "both").tensors.keys() == {"weight"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "entry",
    [
        {"opt": {"weight": ONE}},
        {"adagrad": {"weight": {"sum": ONE, "step": torch.tensor(1.0)}}},
        {"muon": {"weight": {"exp_avg": ONE, "preconditioner": ONE}}},
        {"all": {"net": {"weight": ONE}, "second": {"weight": {"momentum_buffer": ONE}}}},
    ],
)
def test_what_may_be_an_optimizer_is_refused_by_name(tmp_path: Path, entry: dict[str, Any]) -> None:
    dcp.save(entry, checkpoint_id=tmp_path / "x", no_dist=True)
    (name,) = entry
    for write in (sw.convert, sw.export_hf):
        with pytest.raises(StateError, match=f"has tensors in '{name}', and none of them is known"):
            write(tmp_path / "x", tmp_path / "out")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "state",
    [
        {"net": {"step": ONE, "weight": ONE}},
        {"net": {"step": ONE}},
        {"net": {"optimizer.weight": ONE, "opt.weight": ONE}},
        {"net": {"optimizer": {"weight": ONE}, "opt": {"weight": ONE}}},
        {"net": {"codebook.exp_avg": ONE, "codebook.embed": ONE, "up.weight": ONE}},
        {"step": ONE, "weight": ONE},
        {"opt.weight": ONE, "optimizer.weight": ONE},
        {"adopted": {"weight": ONE}},
        {"option_head": {"weight": ONE}},
    ],
)
def test_a_model_may_use_the_words_of_optimizers(tmp_path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    count = len(open_catalog(tmp_path / "x").tensors)
    assert count == len(read_dcp(tmp_path / "x").catalog.tensors)
    assert sw.convert(tmp_path / "x", tmp_path / "out").tensors == count


@pytest.mark.parametrize("flat_optimizer", [False, True])
def test_an_optimizer_in_the_same_state_dict(
    ranks: RankPool, saved: Path, tmp_path: Path, flat_optimizer: bool
) -> None:
    root = str(tmp_path / "flat") if flat_optimizer else str(saved)
    for found in ranks.run_ranks(2, fns.restores_nested, root, flat_optimizer):
        assert list(found["moments"]) == [pytest.approx(0.1)]  # one step with gradients of one
        assert found["steps"] == {1.0}
        assert found["rate"] == (3e-4 if flat_optimizer else 1e-3)
        assert found["step"] == 7
        assert found["tensors"] == 15 * 3


def test_another_optimizer_is_refused(ranks: RankPool, saved: Path) -> None:
    for found in ranks.run_ranks(2, fns.another_optimizer, str(saved)):
        assert found["kind"].startswith(
            "StateError: the checkpoint's optimizer has settings that SGD does not"
        )
        assert "were saved with different settings" in found["groups"]
        assert "extra.tokens" in found["left"]
