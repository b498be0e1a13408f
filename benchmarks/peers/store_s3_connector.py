"""torch's distributed checkpoint by Amazon's ``s3torchconnector``: a DCP checkpoint of the same tensors, in as many files, saved by as many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as dcp
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader

from benchmarks.loading.cases import Case, sharded_model
from tests.harness.object_store import BUCKET

NAME = "s3torchconnector, DCP"
WHOLE = False


def supports(case: Case) -> str | None:
    return None


def prepare(case: Case) -> Callable[[], Any]:
    model = sharded_model(case)

    def load() -> Any:
        model.to_empty(device="cpu")
        config = S3ClientConfig(force_path_style=True)
        reader = S3StorageReader("us-east-1", f"s3://{BUCKET}/dcp/", s3client_config=config)
        dcp.load(dict(model.named_parameters()), storage_reader=reader)
        return model

    return load
