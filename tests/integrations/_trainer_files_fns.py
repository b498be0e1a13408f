"""What the ranks of test_trainer_files.py run: trainers that write files of their own."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from transformers import Trainer

import shardwise as sw
from tests.harness.versions import lacking
from tests.integrations._trainer_fns import whole
from tests.integrations._trainer_parts import Rows, arguments, tokenizer

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained


class Theirs(Trainer):
    """A trainer of another library, which the mixin stands before."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            write(f"{output_dir or self.args.output_dir}/theirs.txt", "save_model")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        write(f"{output_dir}/theirs/rank-{dist.get_rank()}.txt", "_save")


def write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


#: Saved in a file of its own, below the tokenizer's other files.
TEMPLATES = {"default": "D:{{ messages[0].content }}", "tool_use": "T:{{ messages[0].content }}"}


def with_templates() -> Any:
    found = tokenizer()
    found.chat_template = TEMPLATES
    return found


def train(path: str, root: str) -> dict[str, Any]:
    class Mine(ShardwiseTrainer, Theirs):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            write(f"{output_dir}/mine.txt", "_save")

    class Alone(ShardwiseTrainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            write(f"{output_dir}/mine.txt", "_save")

    found: dict[str, Any] = {}
    for kind in (Mine, Alone):
        folder = f"{root}/{kind.__name__}"
        with arguments(folder, max_steps=2, save_steps=2) as args:
            model = load_pretrained(args, path)
            trainer = kind(model, args, train_dataset=Rows(), processing_class=with_templates())
            trainer.train()
            dist.barrier()  # rank 0 takes its lock away when it leaves train
            found[kind.__name__] = sorted(os.listdir(folder))
            found["verified"] = sw.verify(f"{folder}/checkpoint-2").problems
            found["values"] = whole(trainer.model)
            trainer.save_model(f"{root}/export-{kind.__name__}")
            again = kind(
                load_pretrained(args, path), args, train_dataset=Rows(), processing_class=with_templates()
            )
            again.train(resume_from_checkpoint=True)
            found["exact"] = again.resume_report.exact, again.resume_report.differences
    return found
