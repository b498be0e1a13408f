"""diffusers' ``EMAModel`` among the extras: stored by shard under the parameters' names, and exact after a resume."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.diffusion.models import ZOO, write, write_pipeline
from tests.harness.on_ranks import on_ranks
from tests.harness.pool import RankPool

SETTINGS = {"decay": 0.99, "use_ema_warmup": True, "inv_gamma": 1.5, "power": 0.7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ema")
    write("wan", root / "wan")
    return root


def made(folder: Path, **settings: Any) -> tuple[Any, EMAModel, sw.TrainState]:
    model = sw.load_pretrained(folder / "wan", init_device_mesh("cpu", (dist.get_world_size(),)))
    ema = EMAModel(model.parameters(), **{**SETTINGS, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, ema, sw.TrainState(model=model, optimizer=optimizer, extra={"ema": ema})


def train(state: sw.TrainState, first: int, last: int) -> None:
    model: Any = state.model
    optimizer: Any = state.optimizer
    for _ in range(first, last):
        with warnings.catch_warnings(action="ignore"):  # FSDP2's, of a block that returns a view
            loss = model(**ZOO["wan"].inputs(), return_dict=False)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state.extra["ema"].step(model.parameters())


def shards(ema: EMAModel) -> list[torch.Tensor]:
    assert all(isinstance(t, DTensor) for t in ema.shadow_params)
    return [t.to_local().clone() for t in ema.shadow_params]


def full(ema: EMAModel) -> list[torch.Tensor]:
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in ema.shadow_params]


def rest(ema: EMAModel) -> dict[str, Any]:
    return {key: value for key, value in ema.state_dict().items() if key != "shadow_params"}


@on_ranks(2)
def test_as_without_a_stop(folder: Path, tmp_path: Path) -> None:
    _, straight, state = made(folder)
    train(state, 0, 5)
    _, ema, state = made(folder)
    train(state, 0, 3)
    saved = sw.save(state, tmp_path / "step", step=3)
    assert not saved.skipped
    (file,) = (tmp_path / "step/models/ema").glob(f"shard-{dist.get_rank() + 1:05}-*")
    assert sum(t.numel() for t in load_file(file).values()) == sum(t.numel() for t in shards(ema))
    _, again, resumed = made(folder, decay=0.5)
    report = sw.restore(resumed, tmp_path / "step")
    assert report.exact, report
    assert all(map(torch.equal, shards(again), shards(ema)))
    assert rest(again) == rest(ema)
    assert again.decay == 0.99
    train(resumed, 3, 5)
    assert all(map(torch.equal, shards(again), shards(straight)))
    assert rest(again) == rest(straight)


def save_and_step(folder: Path, step: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model, ema, state = made(folder)
    train(state, 0, 3)
    sw.save(state, step, step=3)
    ema.step(model.parameters())  # of each element: the same on any number of ranks
    return full(ema), rest(ema)


def restore_and_step(folder: Path, step: Path) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model, ema, state = made(folder)
    report = sw.restore(state, step)
    assert (report.differences, report.skipped) == (("world size: 2 when saved, 3 now",), ()), report
    ema.step(model.parameters())
    return full(ema), rest(ema)


def test_on_another_number_of_ranks(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    step = tmp_path / "step"
    (expected, counters), _ = ranks.run_ranks(2, save_and_step, folder=folder, step=step)
    for tensors, found in ranks.run_ranks(3, restore_and_step, folder=folder, step=step):
        assert all(map(torch.equal, tensors, expected))
        assert found == counters
    # in this process, without shards
    model = ZOO["wan"].cls.from_pretrained(folder / "wan")
    ema = EMAModel(model.parameters())
    report = sw.restore(sw.TrainState(model=model, extra={"ema": ema}), step)
    assert not any("ema" in line for line in (*report.skipped, *report.differences)), report
    ema.step(model.parameters())
    assert all(map(torch.equal, full(ema), expected))
    assert rest(ema) == counters
    # of other parameters
    fewer = EMAModel(list(model.parameters())[1:])
    with pytest.raises(ShardwiseError, match=r"(?s)missing.*'shadow_params\.0'"):
        sw.restore(sw.TrainState(model=model, extra={"ema": fewer}), step)


@on_ranks(2)
def test_saved_whole(folder: Path, tmp_path: Path) -> None:
    """Its tensors aren't sharded when it's saved, and are in the resumed run."""
    model = ZOO["wan"].cls.from_pretrained(folder / "wan")
    sw.save(sw.TrainState(model=model, extra={"ema": EMAModel(model.parameters())}), tmp_path / "step")
    with pytest.raises(ShardwiseError, match=r"extra\.ema was saved unsharded, but its tensors are sharded"):
        sw.restore(made(folder)[2], tmp_path / "step")


@on_ranks(2)
def test_exported(folder: Path, tmp_path: Path) -> None:
    """From a step, and from the live model: the same folder."""
    model, ema, state = made(folder)
    train(state, 0, 2)
    sw.save(state, tmp_path / "step", step=2)
    sw.export_hf(tmp_path / "step", tmp_path / "out", model_name="ema")
    before = sw.digest(model)
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    sw.export_hf(model, tmp_path / "copied")
    ema.restore(model.parameters())
    assert sw.digest(model) == before
    files = [{f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("out", "copied")]
    assert files[0] == files[1]
    whole = ZOO["wan"].cls.from_pretrained(tmp_path / "out")
    assert all(map(torch.equal, full(ema), whole.parameters()))


class Writing(EMAModel):
    """Copies its weights into the model when it takes them."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.copy_to(self.model.parameters())  # type: ignore[attr-defined]


@on_ranks(2)
def test_one_that_changes_the_model_as_it_is_restored(folder: Path, tmp_path: Path) -> None:
    model, ema, state = made(folder)
    train(state, 0, 2)
    sw.save(state, tmp_path / "step", step=2)
    expected = sw.digest(model)
    other, _, resumed = made(folder)
    writing = Writing(other.parameters(), **SETTINGS)
    writing.model = other  # type: ignore[attr-defined]
    resumed.extra["ema"] = writing
    sw.restore(resumed, tmp_path / "step")
    assert sw.digest(other) == expected
    assert all(map(torch.equal, shards(writing), shards(ema)))


@on_ranks(2)
def test_into_a_pipeline(folder: Path, tmp_path: Path) -> None:
    """By the name of the component, and of the extra that it is."""
    _, _, state = made(folder)
    train(state, 0, 2)
    step, base = tmp_path / "step", tmp_path / "base"
    sw.save(state, step, step=2)
    if dist.get_rank() == 0:
        write_pipeline("wan-2.1", base)
    dist.barrier()
    for given, name in (("transformer=ema", "ema"), ("transformer", "model"), ("transformer=model", "model")):
        sw.export_hf(step, tmp_path / given, pipeline=base, model_name=given)
        sw.export_hf(step, tmp_path / f"{given} alone", model_name=name)
        files = sorted(path.name for path in (tmp_path / f"{given} alone").iterdir())
        assert files == sorted(path.name for path in (tmp_path / given / "transformer").iterdir())
        for file in files:
            alone = (tmp_path / f"{given} alone" / file).read_bytes()
            assert (tmp_path / given / "transformer" / file).read_bytes() == alone, (given, file)
        assert (tmp_path / given / "vae").is_dir()
    with pytest.raises(ShardwiseError, match="has no model 'absent'; it has"):
        sw.export_hf(step, tmp_path / "none", pipeline=base, model_name="transformer=absent")
    sw.save(sw.TrainState(state.model), tmp_path / "one", step=2)
    with pytest.raises(
        ShardwiseError, match="has no model 'ema'; it has model"
    ):  # not the model in its place
        sw.export_hf(tmp_path / "one", tmp_path / "none", pipeline=base, model_name="transformer=ema")
    with pytest.raises(ShardwiseError, match="say which component it is"):
        sw.export_hf(step, tmp_path / "none", pipeline=base)
