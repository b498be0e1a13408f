"""TRL's SFTTrainer with a sharded model: train, checkpoint, resume, export (docs/howto/trainer.md).

    torchrun --nproc-per-node 2 examples/trainer_sft.py --out out
    torchrun --nproc-per-node 2 examples/trainer_sft.py --out out-lora --lora

Lines that differ from a script without shardwise are marked with ``# <-``. Run the script again with more ``--steps`` or
on a different number of ranks, and it resumes where it stopped. ``from_pretrained`` opens ``out/export``; with
``--lora``, PEFT's ``from_pretrained`` does.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained

WORDS = [
    "the",
    "a",
    "red",
    "green",
    "old",
    "small",
    "cat",
    "dog",
    "bird",
    "sees",
    "likes",
    "follows",
    "finds",
    ".",
]


# Samples per step on all ranks. If this changed, a resume would skip or repeat samples, because Trainer counts steps.
GLOBAL_BATCH = 12


class MyTrainer(ShardwiseTrainer, SFTTrainer):  # <-
    """SFTTrainer with shardwise's checkpoints."""


def make_pretrained(path: Path) -> None:
    """Write a tiny random model and its tokenizer, in place of pretrained ones."""
    tokens = ["<pad>", "<eos>", "<unk>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def sentences() -> Dataset:
    """192 sentences in a very small language."""
    draw = torch.Generator().manual_seed(0)

    def pick(*words: str) -> str:
        return words[int(torch.randint(len(words), (), generator=draw))]

    def thing() -> str:
        return " ".join((pick("the", "a"), pick("red", "green", "old", "small"), pick("cat", "dog", "bird")))

    return Dataset.from_list(
        [{"text": f"{thing()} {pick('sees', 'likes', 'follows', 'finds')} {thing()} ."} for _ in range(192)]
    )


def choose_fsdp_on_cpu(args: SFTConfig) -> None:
    """Enable FSDP on CPU ranks, which Accelerate doesn't do automatically. Not needed on GPUs."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    _ = args.device
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState(
        mixed_precision=args.mixed_precision, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True
    )
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if args.mixed_precision != "no":
        plugin.set_mixed_precision(args.mixed_precision)
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoints", help="directory or URL of checkpoints; default: OUT/run")
    parser.add_argument("--steps", type=int, default=12, help="train up to this step")
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if GLOBAL_BATCH % ranks:
        parser.error(f"{GLOBAL_BATCH} samples per step can't be split evenly across {ranks} ranks")
    on_cpu = not torch.cuda.is_available()
    args = SFTConfig(
        output_dir=str(options.out / "run"),
        max_steps=options.steps,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        per_device_train_batch_size=GLOBAL_BATCH // ranks,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        max_length=16,
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
    )
    if on_cpu:
        choose_fsdp_on_cpu(args)
    path = options.out / "pretrained"
    with args.main_process_first():
        if not path.exists():
            make_pretrained(path)

    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None
    # <- instead of AutoModelForCausalLM.from_pretrained
    model, report = load_pretrained(args, path, adapter=adapter, return_report=True)
    if args.process_index == 0:
        print(f"rank 0 read {report.bytes_read:,} bytes of {report.tensors} tensors")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    trainer = MyTrainer(
        model,
        args,
        train_dataset=sentences(),
        processing_class=tokenizer,
        checkpoint_root=options.checkpoints,
    )
    trainer.train(resume_from_checkpoint=trainer.has_checkpoint())
    trainer.save_model(str(options.out / "export"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
