"""What trainers in tests are given: arguments of FSDP2 on CPU ranks, rows, a tokenizer. Without shardwise."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def arguments(
    output_dir: str, kind: Any = None, plugin: bool = True, fsdp: bool | str = True, **options: Any
) -> Iterator[Any]:
    """Arguments of a run with FSDP2, or without. ``fsdp`` is the argument of that name. Accelerate doesn't choose FSDP on CPU by itself; nothing else is set by hand."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, TorchDynamoPlugin
    from transformers import TrainingArguments

    before = dict(os.environ)
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **options.pop("fsdp_config", {})}
            config = {name: value for name, value in config.items() if value is not None}
            sharding = {"fsdp": fsdp, "fsdp_config": config} if fsdp else {}
            # transformers before 5.10 leaves that to the variable
            os.environ["FSDP_STATE_DICT_TYPE"] = config["state_dict_type"]
            args = (kind or TrainingArguments)(
                output_dir=output_dir,
                use_cpu=True,
                **{
                    **sharding,
                    "per_device_train_batch_size": 4 // int(world),
                    "gradient_accumulation_steps": 2,
                    "num_train_epochs": 2,
                    "learning_rate": 1e-2,
                    "lr_scheduler_type": "cosine",
                    "logging_steps": 1,
                    "save_steps": 3,
                    "save_total_limit": 2,
                    "bf16": False,
                    "report_to": [],
                    "disable_tqdm": True,
                    **options,
                },
            )
            _ = args.device
            if fsdp:
                PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if fsdp and plugin:
                AcceleratorState(
                    mixed_precision=args.mixed_precision,
                    parallelism_config=args.parallelism_config,
                    dynamo_plugin=TorchDynamoPlugin(),
                    _from_accelerator=True,
                )
                made = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
                if args.mixed_precision != "no":
                    made.set_mixed_precision(args.mixed_precision)
                AcceleratorState._shared_state["fsdp_plugin"] = made
            yield args
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            os.environ.clear()
            os.environ.update(before)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """48 rows: six steps of eight an epoch."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 101, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 101)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_list(
        [{"input_ids": row["input_ids"].tolist()} for row in (Rows()[i] for i in range(48))]
    )
