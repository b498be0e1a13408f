"""From a pipeline's folder to shards, three steps, a stop, a resume on as many and on other ranks, an export, and diffusers' own pipeline again."""

from __future__ import annotations

import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from tests.diffusion.models import PIPELINES, ZOO, sample, write_pipeline
from tests.harness.pool import RankPool
from tests.harness.tiers import nightly
from tests.loading._load_fns import bits, tensors_of, whole

#: A pipeline, and whether adapters alone are trained.
Run = tuple[str, bool]
SOME: tuple[Run, ...] = (("flux", False), ("wan", False), ("wan-2.1", True))
OTHERS: tuple[Run, ...] = (
    *((kind, False) for kind in PIPELINES if kind not in ("flux", "wan")),
    *((kind, True) for kind in PIPELINES if kind != "wan-2.1"),
)
#: What ``load_lora_weights`` is told for the adapter of a component.
LORA_OF = {"transformer_2": {"load_into_transformer_2": True}}


@pytest.mark.parametrize(
    "runs", [pytest.param(SOME, marks=pytest.mark.slow), *nightly(OTHERS)], ids=["some", "others"]
)
@pytest.mark.timeout(600)
def test_round_trips(ranks: RankPool, tmp_path: Path, runs: tuple[Run, ...]) -> None:
    for kind in {kind for kind, _ in runs}:
        write_pipeline(kind, tmp_path / kind)
    ranks.run_ranks(2, train_and_export, str(tmp_path), runs, timeout_s=240)
    ranks.run_ranks(3, resume_elsewhere, str(tmp_path), runs, timeout_s=240)
    for (kind, lora), count in product(runs, (2, 3)):
        out = tmp_path / f"{kind}-{lora}"
        exported, live = out / f"export-{count}", torch.load(out / f"live-{count}")
        base = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / kind))
        before = sample(base)
        if lora:
            for name in PIPELINES[kind]:
                base.load_lora_weights(exported / name, **LORA_OF.get(name, {}))
            found = {name: base.components[name] for name in PIPELINES[kind]}
            opened = base
        else:
            opened = diffusers.DiffusionPipeline.from_pretrained(str(exported))
            for name, of in PIPELINES[kind].items():
                alone = ZOO[of].cls.from_pretrained(exported / name)
                assert same(tensors_of(alone), live["tensors"][name]), (kind, name)
            found = {name: opened.components[name] for name in PIPELINES[kind]}
            for name in found:  # the live weights in one process
                base.components[name].load_state_dict(live["tensors"][name], strict=False)
                assert same(tensors_of(base.components[name]), live["tensors"][name]), (kind, name)
            assert torch.equal(sample(aligned(base)), sample(aligned(opened))), kind
        for name, model in found.items():
            held = {re.sub(r"\.default_\d\.", ".default.", n): t for n, t in tensors_of(model).items()}
            assert same(held, live["tensors"][name]), (kind, lora, name)
        # The same weights; a shard's place in memory may change the last bit of a product.
        torch.testing.assert_close(sample(opened), live["sample"], atol=1e-5, rtol=1e-5, msg=f"{kind} {lora}")
        assert not torch.allclose(before, live["sample"], atol=1e-5), (kind, "trained to no effect")


def aligned(pipeline: Any) -> Any:
    """With all parameters where torch allocates: the place of one in a mapped file changes the last bit of a product."""
    for model in (m for m in pipeline.components.values() if isinstance(m, torch.nn.Module)):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return pipeline


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(bits(found[name]), bits(tensor)) for name, tensor in expected.items()
    )


def train_and_export(root: str, runs: tuple[Run, ...]) -> None:
    for kind, lora in runs:
        out = Path(root) / f"{kind}-{lora}"
        _, state = load(Path(root), kind, lora)
        steps(kind, state, 3)
        sw.save(state, out / "step")
        steps(kind, state, 1)
        resumed, again = load(Path(root), kind, lora, seed=1)
        assert sw.restore(again, out / "step").exact, (kind, lora)
        steps(kind, again, 1)
        last = gathered(state)
        for name, tensors in export(resumed, again, out, lora).items():
            assert same(tensors, last[name]), (kind, lora, name)
        if dist.get_rank() == 0:
            torch.save(last, out / "last")


def resume_elsewhere(root: str, runs: tuple[Run, ...]) -> None:
    for kind, lora in runs:
        out = Path(root) / f"{kind}-{lora}"
        pipeline, state = load(Path(root), kind, lora, seed=1)
        sw.restore(state, out / "step")
        steps(kind, state, 1)
        expected = torch.load(out / "last")
        for name, tensors in export(pipeline, state, out, lora).items():
            for tensor, value in tensors.items():
                torch.testing.assert_close(
                    value, expected[name][tensor], atol=1e-6, rtol=0, msg=f"{kind} {lora} {name}.{tensor}"
                )


def export(pipeline: Any, state: sw.TrainState, out: Path, lora: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Export a resumed pipeline, or its adapters, and keep a sample and the tensors. Returns these."""
    count, tensors = dist.get_world_size(), gathered(state)
    live = {"sample": sample(pipeline), "tensors": tensors}
    for name, model in state.model.items() if lora else ():
        sw.export_hf(model, out / f"export-{count}" / name)
    if not lora:
        sw.export_hf(pipeline, out / f"export-{count}")
    if dist.get_rank() == 0:
        torch.save(live, out / f"live-{count}")
    return tensors


def load(root: Path, kind: str, lora: bool, seed: int = 0) -> tuple[Any, sw.TrainState]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = tuple(PIPELINES[kind])
    config = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    pipeline = sw.load_pipeline(
        root / kind, mesh, shard=names, adapter=dict.fromkeys(names, config) if lora else None, seed=seed
    )
    models = {name: pipeline.components[name] for name in names}
    # A large eps: gradients that are rounding errors must not get the size of a step.
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
        for name, model in models.items()
    }
    return pipeline, sw.TrainState(model=models, optimizer=optimizers)


def steps(kind: str, state: sw.TrainState, count: int) -> None:
    for (name, of), _ in ((item, k) for k in range(count) for item in PIPELINES[kind].items()):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of Flux's blocks
            made = state.model[name](**ZOO[of].inputs(), return_dict=False)[0]
        (made[0] if isinstance(made, list | tuple) else made).square().mean().backward()
        state.optimizer[name].step()
        state.optimizer[name].zero_grad()


def gathered(state: sw.TrainState) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {n: whole(t).detach().clone() for n, t in tensors_of(model).items()}
        for name, model in state.model.items()
    }
