"""DeepSpeed ZeRO's checkpoints: read as boxes on any number of ranks, with the optimizer, and refused where the files don't fit together.

The layout is written by _zero_layout.py, and by DeepSpeed itself where it's installed (``make loggers``).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise.catalog.open import open_catalog
from shardwise.catalog.zero import read_zero
from shardwise.cli import main
from shardwise.errors import FormatError, SourceError, UnsupportedConversionError
from tests.docs.blocks import ROOT
from tests.harness.command import runner
from tests.harness.pool import RankPool
from tests.runs import _zero_fns as fns
from tests.runs._zero_layout import Tensors, classes, make_universal, write
from tests.runs.test_numbered import qwen

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Damage = Callable[[Path, Path], None]
EVERY = [(stage, dtype) for stage in (1, 2, 3) for dtype in DTYPES]


def made(root: Path, stage: int, dtype: str, ranks: int = 2, **options: Any) -> dict[str, Tensors]:
    """Write a checkpoint of :class:`._zero_fns.Net`; gives what must be read: masters and others, and moments."""
    torch.manual_seed(3)
    model = fns.Net()
    names = {id(p): n for n, p in model.named_parameters()}
    groups = [{names[id(p)]: torch.randn(p.shape) for p in g["params"]} for g in fns.groups_of(model)]
    moments = {key: {n: torch.rand(t.shape) for g in groups for n, t in g.items()} for key in fns.MOMENTS}
    frozen = {n: p.detach().to(DTYPES[dtype]) for n, p in model.named_parameters() if not p.requires_grad}
    buffers = {"running": torch.randn(5, dtype=DTYPES[dtype]), "count": torch.tensor(9)}
    shared = {"head.weight": "embed.weight"}
    write(
        root,
        stage,
        ranks,
        DTYPES[dtype],
        groups,
        moments,
        frozen=frozen,
        buffers=buffers,
        shared=shared,
        **options,
    )
    masters = {n: t for g in groups for n, t in g.items()}
    return {
        "model": {**masters, **frozen, **buffers, "head.weight": masters["embed.weight"]},
        "moments": {f"{n}.{key}": t for key, of in moments.items() for n, t in of.items()},
    }


def really_made(root: Path, stage: int, dtype: str, ranks: int, *options: str) -> dict[str, Tensors]:
    """The same by DeepSpeed, with what its own tools read."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = ["-m", "tests.runs._zero_fns", str(root), str(stage), dtype, *options]
    done = subprocess.run([*launched, *words], env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    os.environ["DS_ACCELERATOR"] = "cpu"
    tool = importlib.import_module("deepspeed.utils.zero_to_fp32")
    folder = str(root / "global_step2")
    with contextlib.redirect_stdout(io.StringIO()):
        merged = tool.get_fp32_state_dict_from_zero_checkpoint(str(root))
        models = tool.parse_model_states(tool.get_model_state_files(folder))
        files = [torch.load(file, weights_only=False) for file in tool.get_optim_files(folder)]
        held = [file["optimizer_state_dict"] for file in files]
        states = [one.get("base_optimizer_state", one.get("optimizer_state_dict"))["state"] for one in held]
        moments = {}
        for key in fns.MOMENTS:  # moments are cut as the masters are: the same function puts them together
            flats = [[one[k][key] for k in range(len(one))] for one in states]
            if stage == 3:
                found = tool._get_fp32_state_dict_from_zero3_checkpoint(ranks, flats, models, True)
            else:
                paddings = held[0]["param_alignment_paddings"]
                found = tool._get_fp32_state_dict_from_zero2_checkpoint(ranks, flats, models, True, paddings)
            whole = tool.to_torch_tensor(found)
            moments |= {f"{n}.{key}": whole[n] for group in models[0].param_shapes for n in group}
    return {"model": merged, "moments": moments}


def differences(found: Tensors, expected: Tensors) -> list[str]:
    """Names of tensors that aren't the same bit for bit. Buffers of a 16-bit dtype are compared in the dtype that's expected."""
    assert found.keys() >= expected.keys()
    return [n for n, t in expected.items() if not torch.equal(found[n].to(t.dtype), t)]


def check(ranks: RankPool, root: Path, expected: dict[str, Tensors], now: int) -> None:
    results = ranks.run_ranks(now, fns.takes_over, str(root))
    for one in results:
        assert differences(one["model"], expected["model"]) == []
        assert one["moments"].keys() == expected["moments"].keys()
        assert differences(one["moments"], expected["moments"]) == []
        assert (one["steps"], one["step"]) == ({2.0}, 2)
        assert one["rates"] == [(1e-2, 0.1), (1e-2, 0.0)]
    step = read_zero(str(root / "global_step2"))
    tensors = [t for n, t in step.catalog.tensors.items() if n != "head.weight"]
    states = [t for of in step.optimizer()["state"].values() for t in of.values()]  # type: ignore[misc]
    needed = sum(t.nbytes for t in (*tensors, *states))
    assert sum(one["read"] for one in results) <= 1.02 * needed


@pytest.mark.parametrize(("stage", "dtype"), EVERY)
@pytest.mark.parametrize("now", [1, 2, 3])
def test_a_run_is_restored_at_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, stage: int, dtype: str, now: int
) -> None:
    """Masters, moments and the step, bit for bit, and no byte is read that no rank needs."""
    check(ranks, tmp_path / "run", made(tmp_path / "run", stage, dtype), now)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "dtype"), EVERY)
def test_a_run_of_deepspeed_itself(ranks: RankPool, tmp_path: Path, stage: int, dtype: str) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("`make loggers` installs it")
    expected = really_made(tmp_path / "run", stage, dtype, 2)
    for now in (1, 2, 3):
        check(ranks, tmp_path / "run", expected, now)
    words = [
        "--input_folder",
        tmp_path / "run/global_step2",
        "--output_folder",
        tmp_path / "universal/global_step2",
    ]
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words, "--inject_missing_state"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    check(ranks, tmp_path / "universal", expected, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    expected = made(tmp_path / "run", stage, "bf16", 3)
    folder = tmp_path / "run/global_step2"
    trained = {n.removesuffix(".exp_avg") for n in expected["moments"] if n.endswith(".exp_avg")}
    states = {key: {n: expected["moments"][f"{n}.{key}"] for n in trained} for key in fns.MOMENTS}
    make_universal(folder, stage, {"fp32": {n: expected["model"][n] for n in trained}, **states})
    check(ranks, tmp_path / "run", expected, 2)
    (folder / "zero/conv.bias/fp32.pt").rename(tmp_path / "bias.pt")
    with pytest.raises(SourceError, match=r"has no fp32\.pt of 'conv\.bias'"):
        open_catalog(tmp_path / "run")
    shutil.copy(folder / "zero/conv.weight/fp32.pt", folder / "zero/conv.bias/fp32.pt")
    with pytest.raises(SourceError, match=r"conv\.bias/fp32\.pt: has shape \[.*\], expected \[36\]"):
        open_catalog(tmp_path / "run")


@pytest.mark.parametrize(
    ("stage", "ranks", "options"),
    [
        (1, 3, {"deal": True}),
        (2, 3, {"align_params": True}),
        (2, 3, {"align_params": True, "deal": True}),
        (3, 5, {}),
    ],
)
def test_other_layouts(tmp_path: Path, stage: int, ranks: int, options: dict[str, bool]) -> None:
    expected = made(tmp_path / "run", stage, "bf16", ranks, **options)
    model = fns.Net()
    sw.load(model, tmp_path / "run")
    assert differences(model.state_dict(), expected["model"]) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "ranks", "options"), [(2, 3, ["dealt"]), (3, 3, ["subgroups"])])
def test_other_layouts_of_deepspeed_itself(
    tmp_path: Path, stage: int, ranks: int, options: list[str]
) -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("`make loggers` installs it")
    expected = really_made(tmp_path / "run", stage, "bf16", ranks, *options)
    model = fns.Net()
    sw.load(model, tmp_path / "run")
    assert differences(model.state_dict(), expected["model"]) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_every_command_reads_it(tmp_path: Path, stage: int) -> None:
    """The root with the file ``latest``, or the folder of one step."""
    root = tmp_path / "run"
    expected = made(root, stage, "bf16")
    for path in (root, root / "global_step2"):
        assert set(open_catalog(path).tensors) == set(expected["model"])
    (root / "latest").unlink()
    with pytest.raises(
        SourceError, match=r"its folder global_step2 is a DeepSpeed checkpoint \(ZeRO\); give .*/global_step2"
    ):
        open_catalog(root)
    (root / "latest").write_text("global_step2\n")
    with pytest.raises(
        SourceError, match=r"one rank's file of a DeepSpeed checkpoint .* Give its directory: "
    ):
        open_catalog(next((root / "global_step2").glob("*optim_states.pt")))

    def run(*words: object, status: int = 0) -> str:
        done = runner().invoke(main, [*map(str, words)], prog_name="shardwise")
        assert done.exit_code == status, done.output
        return done.output

    assert "embed.weight" in run("inspect", root)
    out = tmp_path / "step-00000002"
    assert "latest" not in run("convert", root, out, "--to", "checkpoint")
    run("verify", out)
    model = fns.Net()
    optimizer = torch.optim.AdamW(fns.groups_of(model))
    assert sw.restore(sw.TrainState(model=model, optimizer=optimizer), out).step == 2
    assert differences(model.state_dict(), expected["model"]) == []
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert torch.equal(optimizer.state[p]["exp_avg"], expected["moments"][f"{name}.exp_avg"])
    other = tmp_path / "other"
    shutil.copytree(root, other)
    assert "no differences" in run("diff", root, other)
    first = sorted((other / "global_step2").glob("*optim_states.pt"))[0]
    with classes():
        content = torch.load(first, weights_only=False)
        held = content["optimizer_state_dict"]
        held.get("fp32_flat_groups", held.get("single_partition_of_fp32_groups"))[0][0] += 1
        held.get("base_optimizer_state", held.get("optimizer_state_dict"))["state"][1]["exp_avg"][0] += 1
        torch.save(content, first)
    changed = sw.diff(root, other).changed
    assert [c.name for c in changed] == ["model:scale", "optimizer:body.0.bias.exp_avg"]


@pytest.mark.parametrize("counted", ["parameter", "group"])
def test_deepspeeds_own_adam(tmp_path: Path, counted: str) -> None:
    """It has the step as a number and a setting more; torch's AdamW takes its state and steps on."""
    expected = made(tmp_path / "run", 2, "bf16", own_adam=counted)
    sw.convert(tmp_path / "run", tmp_path / "ours")
    for path in (tmp_path / "run", tmp_path / "ours"):
        model = fns.Net()
        optimizer = torch.optim.AdamW(fns.groups_of(model))
        sw.restore(sw.TrainState(model=model, optimizer=optimizer), path)
        model(torch.arange(8)[None]).square().mean().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                assert torch.equal(optimizer.state[p]["exp_avg"], expected["moments"][f"{name}.exp_avg"])
        optimizer.step()
        assert {float(of["step"]) for of in optimizer.state.values()} == {3.0}


def test_a_transformers_model(tmp_path: Path) -> None:
    """With its config.json next to the file ``latest``: load_pretrained, export and convert, in the dtype that's asked for."""
    root = tmp_path / "run"
    model = qwen()
    trained = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
    shared = {n: next(iter(model.all_tied_weights_keys.values())) for n in model.all_tied_weights_keys}
    write(root, 3, 3, torch.bfloat16, [trained], {}, frozen={}, buffers={}, shared=shared)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(root)
    loaded = sw.load_pretrained(root, dtype=torch.float32)
    assert differences(dict(loaded.named_parameters()), trained) == []
    for words in (("export",), ("convert", "--to", "hf")):
        out = tmp_path / words[0]
        done = runner().invoke(main, [words[0], str(root), str(out), *words[1:]], prog_name="shardwise")
        assert done.exit_code == 0, done.output
        again = type(model).from_pretrained(out, dtype=torch.float32)
        assert differences(dict(again.named_parameters()), trained) == []


def test_a_latest_of_another_program(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4}')
    (tmp_path / "latest").mkdir()
    model = torch.nn.ParameterDict({"weight": torch.zeros(2)})
    assert sw.restore(sw.TrainState(model=model), tmp_path).step == 4


def test_a_trainers_folder(tmp_path: Path) -> None:
    """The HF Trainer's, with the files of DeepSpeed in a folder of it: a restore takes the masters, whatever weights are next to them."""
    expected = made(tmp_path / "checkpoint-2", 2, "bf16")
    (tmp_path / "checkpoint-2/trainer_state.json").write_text('{"global_step": 2}')
    save_file({"scale": torch.zeros(1)}, tmp_path / "checkpoint-2/model.safetensors")
    model = fns.Net()
    state = sw.TrainState(model=model, optimizer=torch.optim.AdamW(fns.groups_of(model)))
    assert sw.restore(state, tmp_path / "checkpoint-2").step == 2
    assert differences(model.state_dict(), expected["model"]) == []


def test_what_only_deepspeed_can_use(tmp_path: Path) -> None:
    """A state that isn't one value per element leaves the weights readable; its own scheduler is no torch scheduler. A folder may have any name."""
    expected = made(tmp_path, 2, "bf16")
    folder = tmp_path / "global_step2"

    def names(held: Any) -> None:  # as torch keeps them for named parameters
        held["base_optimizer_state"]["param_groups"][0]["param_names"] = ["flat"]

    def table(held: Any) -> None:
        held["base_optimizer_state"]["state"][0]["qmap1"] = torch.zeros(256)

    def scheduler(content: Any) -> None:
        content["lr_scheduler"] = {"last_batch_iteration": 2}

    for rank in (0, 1):
        _held(_optim(folder, rank), names)
    _changed(_model(folder), scheduler)
    other = folder.rename(tmp_path / "global_step3")  # a counter of the program's own

    def state() -> sw.TrainState:
        model = fns.Net()
        return sw.TrainState(model=model, optimizer=torch.optim.AdamW(fns.groups_of(model), lr=1.0))

    assert sw.restore(state(), other).step == 2
    scheduled = state()
    scheduled.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(scheduled.optimizers["optimizer"], 10)
    with pytest.raises(UnsupportedConversionError, match="DeepSpeed's own, of step 2"):
        sw.restore(scheduled, other)
    for rank in (0, 1):
        _held(_optim(other, rank), table)
    with pytest.raises(FormatError, match="'qmap1' has 256 values"):
        sw.restore(state(), other)
    model = fns.Net()
    sw.load(model, other)
    assert differences(dict(model.state_dict()), {**model.state_dict(), **expected["model"]}) == []


# ----------------------------------------------------------------------------------------------------
# Damage


def _optim(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _model(folder: Path, rank: int = 0) -> Path:
    found = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    return found if found.exists() else folder / "mp_rank_00_model_states.pt"


def _changed(file: Path, change: Callable[[Any], None]) -> None:
    with classes():
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)


def _held(file: Path, change: Callable[[Any], None]) -> None:
    _changed(file, lambda content: change(content["optimizer_state_dict"]))


def _without(which: Callable[[Path], Path]) -> Damage:
    return lambda folder, _: which(folder).unlink()


def _cut(which: Callable[[Path], Path], nbytes: int) -> Damage:
    def cut(folder: Path, _: Path) -> None:
        file = which(folder)
        file.write_bytes(file.read_bytes()[:-nbytes])

    return cut


def _of_other(name: str, *, which: Callable[[Path], Path] = lambda folder: _optim(folder, 1)) -> Damage:
    """One rank's file of another run takes the place of this run's."""

    def replaced(folder: Path, others: Path) -> None:
        (other,) = (others / name).glob("global_step*")
        shutil.copy(which(other), which(folder))

    return replaced


def _swapped(which: Callable[[Path, int], Path]) -> Damage:
    def swap(folder: Path, _: Path) -> None:
        first, second = which(folder, 0), which(folder, 1)
        content = first.read_bytes()
        second.replace(first)
        second.write_bytes(content)

    return swap


def _swap_mappings(folder: Path, _: Path) -> None:
    """What the files of two ranks say of their partitions, but not the partitions."""
    with classes():
        files = [torch.load(_optim(folder, rank), weights_only=False) for rank in (0, 1)]
        first, second = (file["optimizer_state_dict"] for file in files)
        key = "param_slice_mappings"
        first[key], second[key] = second[key], first[key]
        for rank, file in enumerate(files):
            torch.save(file, _optim(folder, rank))


def _other_start(held: Any) -> None:
    next(iter(held["param_slice_mappings"][0].values())).start += 4


def _fewer(key: str) -> Damage:
    def shorten(held: Any) -> None:
        held[key][0] = held[key][0][:-40].clone()

    return lambda folder, _: _held(_optim(folder, 1), shorten)


def _set(which: Callable[[Path], Path], key: str, value: Any, *, inside: bool = False) -> Damage:
    def change(content: Any) -> None:
        (content["optimizer_state_dict"] if inside else content)[key] = value

    return lambda folder, _: _changed(which(folder), change)


def _other_names(content: Any) -> None:
    """Two parameters of one group, in each other's place."""
    shapes = content["param_shapes"][0]
    names = [*shapes]
    names[1], names[2] = names[2], names[1]
    content["param_shapes"][0] = {name: shapes[name] for name in names}


def _shorter_moments(held: Any) -> None:
    state = held.get("base_optimizer_state", held.get("optimizer_state_dict"))["state"][0]
    state["exp_avg"] = state["exp_avg"][:100].clone()


def _frozen_fragment(content: Any) -> None:
    content["frozen_param_fragments"]["frozen.weight"] = torch.zeros(7, dtype=torch.bfloat16)


def _second(folder: Path) -> Path:
    return _optim(folder, 1)


def _tensor_parallel(folder: Path, _: Path) -> None:
    shutil.copy(_model(folder), folder / "mp_rank_01_model_states.pt")


def _other_prefix(folder: Path, _: Path) -> None:
    shutil.copy(_second(folder), folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")


#: Stage, what is done to the files, and the error. ``others`` has the same run at another step, and on another number of ranks.
DAMAGES: dict[str, tuple[int, Damage, str]] = {
    "no partitions of the last rank": (
        2,
        _without(_second),
        r"has no file of rank\(s\) \[1\] of 2 \(\*_optim_states.pt\)",
    ),
    "no partitions of the first rank": (
        3,
        _without(lambda f: _optim(f, 0)),
        r"has no file of rank\(s\) \[0\] of 2",
    ),
    "no model of the last rank": (
        3,
        _without(lambda f: _model(f, 1)),
        r"has no file of rank\(s\) \[1\] of 2 \(\*_model_states",
    ),
    "no model": (1, _without(_model), r"has no file of rank\(s\) \[0\] of 1 \(\*_model_states"),
    "partitions cut short": (
        2,
        _cut(_second, 900),
        r"rank_1_mp_rank_00_optim_states.pt: not a torch.save file",
    ),
    "a model cut short": (3, _cut(_model, 1), r"rank_0_mp_rank_00_model_states.pt: not a torch.save file"),
    "a file cut in half": (1, _cut(_second, 20_000), "optim_states.pt: not a torch.save file"),
    "partitions of another step": (
        2,
        _of_other("step"),
        r"'optimizer.*step'|'state\.0\.step' isn't the same in .*rank_0.* and .*rank_1",
    ),
    "partitions of another step (3)": (
        3,
        _of_other("step"),
        r"'state\.0\.step' isn't the same in .*rank_0.* and .*rank_1",
    ),
    "a model of another step": (
        2,
        _of_other("step", which=_model),
        "is of step 9, and the partitions in its folder global_step2 are of step 2",
    ),
    "a rank's model of another step": (
        3,
        _of_other("step", which=lambda f: _model(f, 1)),
        "'global_steps' isn't the same",
    ),
    "partitions of a run on 3 ranks": (
        2,
        _of_other("ranks"),
        "is of a run on 3 ranks, and the folder has partitions of 2|has no file",
    ),
    "partitions of a run on 3 ranks (3)": (3, _of_other("ranks"), "is of a run on 3 ranks|has no file"),
    "a model of a run on 3 ranks": (
        2,
        _of_other("ranks", which=_model),
        "is of a run on 3 ranks, and the folder has partitions of 2",
    ),
    "ranks' partitions swapped": (
        2,
        _swapped(_optim),
        r"was saved as bf16_zero_pp_rank_1_.*: the files of ranks are mixed up",
    ),
    "ranks' partitions swapped (3)": (
        3,
        _swapped(_optim),
        r"was saved as bf16_zero_pp_rank_1_.*: the files of ranks are mixed up",
    ),
    "ranks' models swapped": (3, _swapped(_model), r"was saved as zero_pp_rank_1_mp_rank_00_model_states.pt"),
    "ranks' mappings swapped": (
        2,
        _swap_mappings,
        "rank_0_.*: its param_slice_mappings describe other parts than those of rank 0",
    ),
    "a mapping that begins elsewhere": (
        1,
        lambda f, _: _held(_second(f), _other_start),
        "rank_1_.*: its param_slice_mappings describe",
    ),
    "no mappings that can be read": (
        1,
        _set(_second, "param_slice_mappings", 7, inside=True),
        "its param_slice_mappings describe other",
    ),
    "parameters in another order": (
        2,
        lambda f, _: _changed(_model(f), _other_names),
        "its param_slice_mappings describe other parts",
    ),
    "parameters in another order on one rank": (
        3,
        lambda f, _: _changed(_model(f, 1), _other_names),
        "'param_shapes.*' isn't the same",
    ),
    "a short partition": (
        2,
        _fewer("single_partition_of_fp32_groups"),
        "its group 0 have .* elements, and the ranks' partitions",
    ),
    "a short partition (3)": (
        3,
        _fewer("fp32_flat_groups"),
        "its group 0 have .* elements on each rank, and the ranks' partitions",
    ),
    "short moments": (
        2,
        lambda f, _: _held(_second(f), _shorter_moments),
        "'exp_avg' has 100 values, and its partition",
    ),
    "a short frozen part": (
        3,
        lambda f, _: _changed(_model(f, 1), _frozen_fragment),
        "'frozen.weight' needs elements",
    ),
    "another number of groups": (
        2,
        _set(_model, "param_shapes", [{"scale": (1,)}]),
        "has 2 partitions of 1 groups",
    ),
    "another number of partitions": (
        2,
        _set(_second, "partition_count", [2, 4], inside=True),
        "its groups are cut into .2, 4. partitions",
    ),
    "shapes that aren't": (3, _set(_model, "param_shapes", [{"scale": (-1,)}]), "malformed|isn't the same"),
    "no shapes": (2, _set(_model, "param_shapes", None), "isn't a model's file of DeepSpeed ZeRO"),
    "no partitions in the file": (
        2,
        _set(_second, "single_partition_of_fp32_groups", None, inside=True),
        "it has no fp32 partitions",
    ),
    "another stage": (2, _set(_second, "zero_stage", 1, inside=True), "'zero_stage' isn't the same"),
    "tensor parallelism": (2, _tensor_parallel, "of DeepSpeed with tensor, pipeline or expert parallelism"),
    "two files of a rank": (2, _other_prefix, "has two files of rank 1"),
}


def test_what_does_not_fit_together_is_named_before_anything_is_placed(
    ranks: RankPool, tmp_path: Path
) -> None:
    folders = {}
    for stage in (1, 2, 3):
        made(tmp_path / f"run-{stage}", stage, "bf16")
        made(tmp_path / f"others-{stage}/step", stage, "bf16", step=9)
        made(tmp_path / f"others-{stage}/ranks", stage, "bf16", ranks=3)
    for k, (what, (stage, damage, _)) in enumerate(DAMAGES.items()):
        folders[what] = Path(shutil.copytree(tmp_path / f"run-{stage}", tmp_path / f"damaged-{k}"))
        damage(folders[what] / "global_step2", tmp_path / f"others-{stage}")
    results = ranks.run_ranks(2, fns.errors_of, [str(path) for path in folders.values()])
    for of_rank in results:
        for (text, untouched), (what, (_, _, expected)) in zip(of_rank, DAMAGES.items(), strict=True):
            assert re.search(expected, text), (what, text)
            assert untouched, what
