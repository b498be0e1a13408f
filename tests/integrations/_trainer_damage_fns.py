"""What the ranks of test_trainer_damage.py run: resumes of checkpoints that are not what they were, or not all there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from tests.harness.hostile import edit_documents
from tests.harness.logged import warnings_logged
from tests.integrations._trainer_fns import checkpoints, life
from tests.integrations._trainer_parts import Rows, arguments


def _flip(folder: str, shard: int) -> None:
    """One bit of a tensor: no size, header or small file shows it."""
    model = os.path.join(folder, "model")
    name = next(n for n in sorted(os.listdir(model)) if n.startswith(f"shard-{shard:05d}-"))
    with open(os.path.join(model, name), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def fall_back(path: str, root: str) -> dict[str, Any]:
    """The newest of three checkpoints has a wrong bit in rank 1's shards, the second has lost its manifest."""
    found: dict[str, Any] = {}
    options = {"save_total_limit": 5}
    with arguments(f"{root}/whole", **options) as args:
        _, found["whole"] = life(path, args)
    with arguments(f"{root}/run", **options) as args:
        life(path, args, stop=9)
    dist.barrier()
    if dist.get_rank() == 0:
        _flip(f"{root}/run/checkpoint-9", 2)
        os.unlink(f"{root}/run/checkpoint-6/manifest.json")
    dist.barrier()
    for step in (6, 9):
        with arguments(f"{root}/run", **options) as args:
            try:
                life(path, args, resume=f"{root}/run/checkpoint-{step}")
            except ShardwiseError as error:
                found[step] = f"{type(error).__name__}: {error}"
    with arguments(f"{root}/run", **options) as args, warnings_logged() as found["warned"]:
        trainer, found["resumed"] = life(path, args, resume=True)
    found["damaged"], found["exact"] = trainer.resume_report.damaged, trainer.resume_report.exact
    found["left"] = checkpoints(f"{root}/run")
    return found


def fall_back_to_plain(path: str, root: str) -> dict[str, Any]:
    """One process, nothing sharded: the checkpoint before the damaged one is plain Trainer's."""
    from transformers import AutoModelForCausalLM, Trainer

    from tests.integrations._trainer_fns import stop_at

    found: dict[str, Any] = {}
    with arguments(root, fsdp=False) as args:
        model = AutoModelForCausalLM.from_pretrained(path)
        Trainer(model, args, train_dataset=Rows(), callbacks=[stop_at(3)]).train()
    for name, changed in {"first": {}, "second": {"learning_rate": 0.5}}.items():
        with arguments(root, fsdp=False, **changed) as args, warnings_logged() as found[f"{name} warned"]:
            trainer, found[name] = life(path, args, resume=True, stop=6, dropout=0.0)
        found[f"{name} reported"] = trainer.resume_report
        if name == "first":
            _flip(f"{root}/checkpoint-6", 1)
            found["parameters"] = len(list(trainer.model.parameters()))
    found["left"] = checkpoints(root)
    os.remove(f"{root}/checkpoint-3/optimizer.pt")
    with arguments(root, fsdp=False) as args, warnings_logged() as found["lost warned"]:
        trainer, _ = life(path, args, resume=f"{root}/checkpoint-3", stop=4)
    found["lost reported"] = trainer.resume_report
    return found


def model_only(path: str, root: str) -> dict[str, Any]:
    """A checkpoint of ``save_only_model``, resumed from."""
    # Trainer takes save_only_model with this one only; nothing is gathered all the same.
    options = {"save_only_model": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}
    with arguments(root, **options) as args:
        life(path, args, stop=3)
    with arguments(root, **options) as args, warnings_logged() as warned:
        trainer, steps = life(path, args, resume=True, stop=5)
    report = trainer.resume_report
    return {"exact": report.exact, "differences": report.differences, "warned": warned, "steps": steps}


def malformed_places(path: str, root: str) -> dict[str, Any]:
    """The newest checkpoints say of the place in the data what no trainer writes, with right checksums."""
    options = {"save_total_limit": 5}
    with arguments(root, **options) as args:
        life(path, args, stop=9)
    dist.barrier()
    if dist.get_rank() == 0:
        edit_documents(Path(root, "checkpoint-9"), lambda d: d["extra.trainer"].pop("global_batch_size"))
        edit_documents(Path(root, "checkpoint-6"), lambda d: d.update({"extra.data": {}}), "rank/00001")
    dist.barrier()
    found: dict[str, Any] = {}
    for step in (9, 6):
        with arguments(root, **options) as args:
            try:
                life(path, args, resume=f"{root}/checkpoint-{step}")
            except ShardwiseError as error:
                found[step] = f"{type(error).__name__}: {error}"
    with arguments(root, **options) as args:
        trainer, _ = life(path, args, resume=True, stop=4)
    return {**found, "damaged": trainer.resume_report.damaged, "step": trainer.resume_report.step}
