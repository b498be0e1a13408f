"""Rules over TrainingArguments alone."""

from __future__ import annotations

from collections.abc import Iterator

from .facts import Facts, Settings
from .rule import Bite, Rule, each

__all__ = ["TRAINER"]


def _arguments(facts: Facts) -> Iterator[Settings]:
    return iter(facts.arguments)


#: What TrainingArguments put into fsdp_config by themselves.
_BY_DEFAULT = {"min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}


def _ignores_fsdp(settings: Settings) -> bool:
    own = {name for name, value in settings.fsdp.items() if name not in _BY_DEFAULT or value}
    return bool(own) and not settings.values.get("fsdp")


def _model_alone(facts: Facts) -> Iterator[Bite]:
    for settings in facts.arguments:
        values = settings.values
        if not (values.get("save_only_model") and values.get("fsdp")):
            continue
        is_sharded = str(settings.fsdp.get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT"
        if values.get("load_best_model_at_end") or is_sharded:
            beside = "SHARDED_STATE_DICT" if is_sharded else "load_best_model_at_end"
            yield Bite(
                settings.path,
                f"Trainer() raises a ValueError: save_only_model together with {beside} under FSDP.",
                "Without the sharded state it couldn't load the best model, and sharded states are saved together with the optimizer.",
                "Leave save_only_model out: shardwise's Trainer integration saves what a resume needs.",
            )
        else:
            yield Bite(
                settings.path,
                "The run can't be resumed: save_only_model leaves optimizer, scheduler and random states out.",
                "A resume then starts with fresh moments, and the loss jumps.",
                "Set save_only_model to false, at least for the newest checkpoint.",
            )


def _is_low_bit(settings: Settings) -> bool:
    optimizer = str(settings.values.get("optim", ""))
    is_theirs = ("8bit" in optimizer or optimizer.startswith("paged_")) and "torch" not in optimizer
    return is_theirs and bool(settings.values.get("fsdp"))


TRAINER = (
    each(
        _arguments,
        ("trainer.fsdp-config-ignored", "fsdp_config without fsdp", "TrainingArguments of transformers 5.23"),
        when=_ignores_fsdp,
        bites="Each GPU holds the full model: fsdp_config is set, but fsdp isn't.",
        why="The Trainer reads fsdp_config only if fsdp is set.",
        do="Set fsdp to true (or 'full_shard').",
    ),
    Rule(
        "trainer.save-only-model",
        "save_only_model under FSDP",
        "Trainer in transformers 5.23",
        _model_alone,
    ),
    each(
        _arguments,
        ("trainer.data-skip", "ignore_data_skip", "case 17; accelerate#2016"),
        when=lambda s: s.values.get("ignore_data_skip"),
        bites="After a resume, the run trains on some samples again and never on others.",
        why="ignore_data_skip restarts the data at the checkpoint's step.",
        do="Set it to false; shardwise's Trainer integration continues at the data position without reading through the data.",
    ),
    each(
        _arguments,
        ("trainer.two-halves", "both bf16 and fp16", "TrainingArguments of transformers 5.23"),
        when=lambda s: s.values.get("bf16") and s.values.get("fp16"),
        bites="TrainingArguments raises a ValueError: bf16 and fp16 are both on.",
        why="A run can use only one of them.",
        do="Keep bf16, and set fp16 to false.",
    ),
    each(
        _arguments,
        ("trainer.checkpointing", "gradient_checkpointing under FSDP", "transformers#30404"),
        when=lambda s: s.values.get("gradient_checkpointing") and s.values.get("fsdp"),
        bites="Each backward gathers every block one time more than necessary.",
        why="gradient_checkpointing wraps inside of FSDP's groups, whose forward runs again with its all-gather.",
        do="Set fsdp_config.activation_checkpointing instead.",
    ),
    each(
        _arguments,
        (
            "trainer.low-bit-optimizer",
            "a bitsandbytes optimizer under FSDP",
            "bitsandbytes#89, axolotl#2744",
        ),
        when=_is_low_bit,
        bites=lambda s: (
            f"A checkpoint of this run can't be resumed, or saving it fails: optim is {s.values['optim']}."
        ),
        why="bitsandbytes keeps state for its local shard, without the shard's position in the parameter.",
        do="Use adamw_torch_fused, or torchao's AdamW8bit, whose state shardwise saves and resumes (docs/state.md).",
    ),
)
