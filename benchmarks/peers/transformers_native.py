"""transformers' own sharded load: ``from_pretrained(distributed_config=DistributedConfig(fsdp_size=N))``.

Its shards are private maps of the files where it converts nothing: their pages come when they are used, so that its
time has no copy in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.loading.cases import Case

NAME = "transformers from path"
WHOLE = True


def supports(case: Case) -> str | None:
    if case.model == "linear":
        return "it is no model of transformers"
    return None if case.layout == "dim 0" else "it chooses the cuts itself: FSDP2 along dim 0"


def prepare(case: Case) -> Callable[[], Any]:
    transformers.utils.logging.disable_progress_bar()
    config = DistributedConfig(fsdp_size=case.ranks)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            case.directory, dtype="auto", distributed_config=config, local_files_only=True
        )

    return load
