"""Run:ai's model streamer: the ranks share the reads and pass all tensors on to each other; each copies its rows into its shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runai_model_streamer import SafetensorsStreamer
from torch.distributed.tensor import DTensor

from benchmarks.loading.cases import Case, sharded_model
from benchmarks.stores.served import MODEL

NAME = "Run:ai streamer"
WHOLE = False


def supports(case: Case) -> str | None:
    return "it converts nothing: experts are stored one by one" if case.model == "moe" else None


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)
    os.environ.update(RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0", RUNAI_STREAMER_LOG_LEVEL="WARNING")
    os.environ["RUNAI_STREAMER_DIST"] = "1"  # else only NCCL shares reads

    def load() -> Any:
        model.to_empty(device="cpu")
        found = dict(model.named_parameters())
        with SafetensorsStreamer() as streamer, torch.no_grad():
            streamer.stream_files(
                [f"{MODEL}/{file.name}" for file in case.files], is_distributed=True, owned=False
            )
            for name, tensor in streamer.get_tensors():
                shard = found[name]
                assert isinstance(shard, DTensor)
                rows = -(-tensor.shape[0] // dist.get_world_size())
                local = shard.to_local()
                start = min(dist.get_rank() * rows, tensor.shape[0])
                local.copy_(tensor[start : start + local.shape[0]])
        return model

    return load
