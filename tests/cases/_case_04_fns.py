"""What the ranks run in the test of case 4."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import shardwise as sw
from shardwise.errors import PlanError, RankError
from tests.cases._fns import AnonymousPeak, anonymous_bytes, mesh_of
from tests.loading._load_fns import assert_same_whole, local, nothing_else_changes, whole

IDS = torch.arange(12).reshape(2, 6) + 3


def load_text_part(directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """The text part of a vision-language checkpoint, in a class of the directory's own; what it costs this rank."""
    from transformers import Qwen3MoeForCausalLM  # noqa: F401 - importing transformers adds warning filters

    mesh = mesh_of()
    sw.load_pretrained(directory, mesh, trust_remote_code=True, **options)  # what is paid once
    dist.barrier()
    before, peak = anonymous_bytes(), AnonymousPeak()
    peak.start()
    with nothing_else_changes():
        model, report = sw.load_pretrained(
            directory, mesh, trust_remote_code=True, **options, return_report=True
        )
    peak_bytes = peak.stop() - before
    after = anonymous_bytes() - before
    key_mapping = options["key_mapping"]
    ordinary = AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, key_mapping=key_mapping
    )
    assert_same_whole(model, ordinary)
    experts = {n: p for n, p in model.named_parameters() if ".experts." in n}
    for name, parameter in experts.items():
        assert isinstance(parameter, DTensor), name
        assert local(parameter).numel() * dist.get_world_size() == parameter.numel(), name
    loss = model(input_ids=IDS, labels=IDS).loss
    torch.testing.assert_close(loss, ordinary(input_ids=IDS, labels=IDS).loss)
    loss.backward()
    assert whole(model.gain.grad).abs() > 0
    return {
        "experts": len(experts),
        "model": report.model_bytes,
        "shard": report.local_bytes,
        "read": report.bytes_read,
        "peak": peak_bytes,
        "after": after,
        "class": type(ordinary).__name__,
    }


def undeclared(directory: str) -> tuple[str, ...]:
    """The error of a load without declarations."""
    try:
        sw.load_pretrained(directory, mesh_of(), trust_remote_code=True)
    except PlanError as error:
        return error.problems
    return ()


def other_code_on_one_rank(directories: list[str], options: dict[str, Any]) -> str:
    """A node whose copy of the code is another version."""
    directory = directories[dist.get_rank()]
    try:
        sw.load_pretrained(directory, mesh_of(), trust_remote_code=True, **options)
    except RankError as error:
        return str(error)
    return ""
