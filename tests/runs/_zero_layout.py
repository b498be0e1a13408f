"""Writes the files of DeepSpeed ZeRO without DeepSpeed.

After DeepSpeed 0.19.8: ``engine.py`` (``_common_checkpoint_state``, ``_save_zero_checkpoint``, ``_get_zero_ckpt_name``, ``_get_ckpt_name``),
``zero/stage_1_and_2.py`` (``state_dict``, ``_create_param_mapping``) and ``zero/stage3.py`` (``_rigid_state_dict``). test_zero.py compares the
readers with files of the library itself if it's installed.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
_STAGES = enum.IntEnum("ZeroStageEnum", {"optimizer_states": 1, "gradients": 2, "weights": 3})
_ADDRESS = make_dataclass("fragment_address", [("numel", int), ("start", int)])
_SCALER = type("LossScaler", (), {})
_CLASSES: dict[str, Any] = {
    "deepspeed.runtime.zero.config": _STAGES,
    "deepspeed.utils.tensor_fragment": _ADDRESS,
    "deepspeed.runtime.fp16.loss_scaler": _SCALER,
}


@contextmanager
def classes() -> Iterator[None]:
    """Lets pickle find the classes under their names in DeepSpeed."""
    before, made = dict(sys.modules), {}
    for name, cls in _CLASSES.items():
        for k in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:k])
            made.setdefault(part, ModuleType(part))
        cls.__module__ = name
        setattr(made[name], cls.__name__, cls)
    sys.modules.update(made)
    yield
    for name in made:
        sys.modules.pop(name)
        if name in before:
            sys.modules[name] = before[name]


def write(
    root: Path,
    stage: int,
    ranks: int,
    dtype: torch.dtype,
    groups: list[Tensors],
    moments: dict[str, Tensors],
    *,
    frozen: Tensors,
    buffers: Tensors,
    shared: dict[str, str],
    step: int = 2,
    align_params: bool = False,
    deal: bool = False,
    own_adam: str = "",
) -> Path:
    """The checkpoint of one step in ``root``; gives the folder of its files.

    ``groups``: fp32 masters by group. ``moments``: by state, then by parameter. ``align_params``: each parameter begins at a multiple of four.
    ``deal``: the order of ``round_robin_gradients``. ``own_adam``: DeepSpeed's in place of torch's, which counts steps by "parameter" (ops/adam
    cpu_adam.py and fused_adam.py), or by "group", as older versions did.
    """
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    (root / "zero_to_fp32.py").touch()
    before = groups
    if deal:
        groups = [{n: g[n] for r in range(ranks) for n in [*g][r::ranks]} for g in groups]
    flat = {
        "fp32": [*groups],
        **{key: [{n: of[n] for n in g} for g in groups] for key, of in moments.items()},
    }
    paddings = [
        [(-t.numel() % 4 if align_params and k < len(g) - 1 else 0) for k, t in enumerate(g.values())]
        for g in groups
    ]
    parts = {
        key: [_partitions(g, ranks, stage, pad) for g, pad in zip(each, paddings, strict=True)]
        for key, each in flat.items()
    }
    common = {"ds_config": {"zero_optimization": {"stage": stage}}, "ds_version": "0.19.8"}
    for rank in range(ranks):
        settings = [
            {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1 * (k == 0), "params": [k]}
            for k in range(len(groups))
        ]
        states = {
            k: {
                "step": torch.tensor(float(step)),
                **{key: parts[key][k][rank][0].clone() for key in moments},
            }
            for k in range(len(groups))
        }
        if own_adam:
            for one in settings:
                one |= {"bias_correction": True, **({"step": step} if own_adam == "group" else {})}
            for of in states.values():
                of.pop("step")
                of |= {"step": step} if own_adam == "parameter" else {}
        inner = {"state": states, "param_groups": settings}
        held: dict[str, Any] = {"zero_stage": _STAGES(stage), "loss_scaler": _SCALER(), "overflow": False}
        if stage == 3:
            held |= {"partition_count": ranks, "optimizer_state_dict": inner}
            held["fp32_flat_groups"] = [_with_attribute(of_ranks[rank][0]) for of_ranks in parts["fp32"]]
        else:
            lean = [of_ranks[rank][0][: of_ranks[rank][1]] for of_ranks in parts["fp32"]]
            held |= {"base_optimizer_state": inner, "single_partition_of_fp32_groups": lean}
            held |= {"partition_count": [ranks] * len(groups), "param_alignment_paddings": paddings}
            held["param_slice_mappings"] = [
                _addresses(g, ranks, rank, pad)
                for g, pad in zip(groups if align_params else before, paddings, strict=True)
            ]
        prefix = "bf16_" if dtype == torch.bfloat16 else ""
        path = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        with classes():
            torch.save({"optimizer_state_dict": held, **common}, path)
        if stage < 3 and rank:
            continue
        whole = {n: t.to(dtype) for g in groups for n, t in g.items()}
        module = {**whole, **frozen, **buffers, **{a: whole[n] for a, n in shared.items()}}
        fragments: dict[str, torch.Tensor] | None = dict(frozen) if stage == 2 else None
        if stage == 3:
            module = {**{n: torch.empty(0, dtype=dtype) for n in module}, **buffers}
            fragments = {n: _equal_parts(t, ranks)[rank].clone() for n, t in frozen.items()}
        model = {
            "module": OrderedDict(module),
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((n, t.shape) for n, t in g.items()) for g in groups],
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items())
            if stage > 1
            else None,
            "frozen_param_fragments": fragments,
            "shared_params": shared if rank == 0 else {},
            "lr_scheduler": {"last_epoch": step},
            "global_steps": step,
            "skipped_steps": 0,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            **common,
        }
        torch.save(
            model, folder / f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"
        )
    return folder


def make_universal(folder: Path, stage: int, states: dict[str, Tensors]) -> None:
    """Put the states of parameters in files of their own, in place of the partitions: ``checkpoint/ds_to_universal.py``."""
    files = sorted(folder.glob("*_optim_states.pt"))
    with classes():
        held = torch.load(files[0], weights_only=False)["optimizer_state_dict"]
        inner = held["optimizer_state_dict"] if stage == 3 else held.pop("base_optimizer_state")
        for key, of in states.items():
            for name, t in of.items():
                (folder / "zero" / name).mkdir(parents=True, exist_ok=True)
                torch.save(
                    t.reshape(-1) if stage == 3 else {"param": t, "cat_dim": 0},
                    folder / f"zero/{name}/{key}.pt",
                )
                if stage < 3:
                    torch.save(inner["state"][0]["step"], folder / f"zero/{name}/step.pt")
        torch.save({**held, "param_groups": inner["param_groups"]}, folder / "zero/optimizer_state.pt")
    for file in files:
        file.unlink()
    (folder.parent / "latest").rename(folder.parent / "latest_universal")


def _equal_parts(t: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    part = math.ceil(t.numel() / ranks)
    padded = torch.zeros(part * ranks, dtype=t.dtype)
    padded[: t.numel()] = t.reshape(-1)
    return list(padded.split(part)) if part else [padded] * ranks


def _partitions(
    group: Tensors, ranks: int, stage: int, paddings: list[int]
) -> list[tuple[torch.Tensor, int]]:
    """Each rank's part of a group, and how many of its elements aren't padding at the end."""
    if stage == 3:
        parts = [_equal_parts(t, ranks) for t in group.values()]
        return [(joined := torch.cat([p[rank] for p in parts]), joined.numel()) for rank in range(ranks)]
    pieces = [
        torch.cat([t.reshape(-1), torch.zeros(pad)]) for t, pad in zip(group.values(), paddings, strict=True)
    ]
    vector = torch.cat(pieces)
    padded = torch.cat([vector, torch.zeros(-vector.numel() % (2 * ranks))])
    part = padded.numel() // ranks
    return [
        (padded[rank * part : (rank + 1) * part].clone(), min(part, max(0, vector.numel() - rank * part)))
        for rank in range(ranks)
    ]


def _addresses(group: Tensors, ranks: int, rank: int, paddings: list[int]) -> dict[str, Any]:
    """Of the parameters that a rank's partition touches, in their order: where."""
    part = _partitions(group, ranks, 2, paddings)[0][0].numel()
    found, at = OrderedDict(), 0
    for (name, t), padding in zip(group.items(), paddings, strict=True):
        first, last = max(at, rank * part), min(at + t.numel(), (rank + 1) * part)
        if first < last:
            found[name] = _ADDRESS(numel=last - first, start=first - rank * part)
        at += t.numel() + padding
    return found


def _with_attribute(t: torch.Tensor) -> torch.Tensor:
    """As ZeRO 3's flat groups, which have a number: such a tensor is pickled in another way."""
    t = t.clone()
    t.ds_id = "1_2"  # type: ignore[attr-defined]
    return t
