"""Download, then load: rank 0 downloads all files, eight at a time as huggingface_hub does, each in parts by boto3; then all ranks load from
the disk, by shardwise."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import torch.distributed as dist
from boto3.s3.transfer import TransferConfig

import shardwise as sw
from benchmarks.loading.cases import Case, sharded_model
from tests.harness.object_store import BUCKET

NAME = "download, then load"
WHOLE = False
_AT_ONCE = 8


def supports(case: Case) -> str | None:
    return None


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)
    folder = f"{case.directory}.downloaded"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.mkdir(folder)

    def load() -> Any:
        if dist.get_rank() == 0:
            _download(folder)
        dist.barrier()
        sw.load(model, folder)
        return model

    return load


def _download(folder: str) -> None:
    client = boto3.client("s3")
    parts = TransferConfig(multipart_threshold=8 * 2**20, multipart_chunksize=8 * 2**20)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix="model/")["Contents"]

    def get(key: str) -> None:
        client.download_file(BUCKET, key, os.path.join(folder, os.path.basename(key)), Config=parts)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(get, [one["Key"] for one in found]))
