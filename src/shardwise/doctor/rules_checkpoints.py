"""Rules over given checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .facts import Checkpoint, Facts
from .rule import Bite, Rule, count, each, gib
from .rules_models import some

__all__ = ["CHECKPOINTS"]


def _checkpoints(facts: Facts) -> Iterator[Checkpoint]:
    return iter(facts.checkpoints)


def _damaged(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        for name, how in checkpoint.damaged.items():
            yield Bite(
                f"{checkpoint.path}: {name}",
                f"A resume passes this step by, or fails: {how.partition(chr(10))[0]}",
                "Its files are not those that its manifest lists.",
                "See every step with shardwise verify PATH, and copy it again from a mirror if there is one.",
            )


def _aside(checkpoint: Checkpoint) -> str:
    what = "and they keep their bytes" if checkpoint.steps else "and no other is left to resume from"
    return f"A resume no longer counts {count(len(checkpoint.set_aside), 'step')} ({some(checkpoint.set_aside)}), {what}."


#: What a resume does without each part.
_WITHOUT = {
    "optimizer": "a resume from it starts with fresh moments, and the loss jumps",
    "scheduler": "the HF Trainer then restores neither scheduler nor optimizer, and the loss jumps",
    "random states": "dropout and the order of the data then differ from those of a run that never stopped",
}


def _name(checkpoint: Checkpoint) -> str:
    return os.path.basename(checkpoint.path)


def _incomplete(checkpoint: Checkpoint) -> str:
    lost = [*checkpoint.lost]
    if not lost:
        return (
            f"{_name(checkpoint)} lacks {some(checkpoint.lost_files)}, which the checkpoints next to it have."
        )
    words = f"{', '.join(lost[:-1])} and {lost[-1]}" if len(lost) > 1 else lost[0]
    others = f". It also lacks {some(checkpoint.lost_files)}" if checkpoint.lost_files else ""
    return f"{_name(checkpoint)} has no {words}: {_WITHOUT[lost[0]]}{others}."


def _is_model_only(facts: Facts, checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.lost) and (
        checkpoint.is_model_only or any(a.values.get("save_only_model") is True for a in facts.arguments)
    )


def _lacking(facts: Facts) -> Iterator[Checkpoint]:
    for checkpoint in facts.checkpoints:
        if (checkpoint.lost or checkpoint.lost_files) and not _is_model_only(facts, checkpoint):
            yield checkpoint


def _model_only(facts: Facts) -> list[Checkpoint]:
    return [c for c in facts.checkpoints if _is_model_only(facts, c)]


def _was_resumed(facts: Facts) -> bool:
    return any(log.resumed for log in facts.logs)


def _resumed(facts: Facts) -> Iterator[Bite]:
    if (found := _model_only(facts)) and _was_resumed(facts):
        yield Bite(
            _places(found),
            "The run was resumed from a checkpoint that has only the model: the optimizer's moments and the learning rate schedule "
            "started again, and the loss jumps.",
            "The run's TrainingArguments have save_only_model=True, and a log or trainer_state.json shows a resume.",
            "Set save_only_model to false and start again from before the resume; these checkpoints can't restore what they don't have.",
        )


def _only_noted(facts: Facts) -> Iterator[Bite]:
    if (found := _model_only(facts)) and not _was_resumed(facts):
        holds = f"{_name(found[0])} holds" if len(found) == 1 else f"{len(found)} checkpoints hold"
        yield Bite(
            _places(found),
            f"{holds} the model only: a resume starts with fresh moments and from the beginning of the learning rate schedule, and "
            "the loss jumps.",
            "The run's TrainingArguments have save_only_model=True.",
            "Set save_only_model to false if you want to resume.",
        )


def _pickles(facts: Facts) -> Iterator[Bite]:
    if found := [c for c in facts.checkpoints if c.pickles]:
        names = tuple(dict.fromkeys(name for c in found for name in c.pickles))
        which = "this checkpoint" if len(found) == 1 else f"one of these {len(found)} checkpoints"
        yield Bite(
            _places(found),
            f"Opening {which} can run any code that its author put in: {some(names)}.",
            "These files are pickles, and torch.load(weights_only=False) and DCP's reader execute them.",
            "If it is not your own, read it only with shardwise: shardwise convert PATH OUT --to checkpoint.",
        )


def _places(found: Sequence[Checkpoint]) -> str:
    """One path, or the directory of several and how many there are."""
    if len(found) == 1:
        return found[0].path
    above = {os.path.dirname(c.path) for c in found}
    return (
        f"{above.pop()}: {len(found)} checkpoints"
        if len(above) == 1
        else f"{found[0].path} and {len(found) - 1} more"
    )


def _merge(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    for checkpoint in facts.checkpoints:
        if memory is not None and checkpoint.kind == "dcp" and checkpoint.nbytes > memory.free_bytes:
            yield Bite(
                checkpoint.path,
                f"accelerate merge-weights and dcp_to_torch_save are killed on this host: {gib(checkpoint.nbytes)} of parts, "
                f"{gib(memory.free_bytes)} of free memory.",
                "One process reads the whole checkpoint, and then writes it.",
                "shardwise export PATH OUT holds a few tensors at a time, and writes files of the hub's size.",
            )


CHECKPOINTS = (
    Rule(
        "checkpoint.resumed-model-only",
        "a checkpoint-N saved with save_only_model, and a log or trainer_state.json that shows a resume",
        "case 5; Trainer in transformers 5.23",
        _resumed,
    ),
    Rule("checkpoint.damaged", "one of the newest steps is damaged", "docs/format.md", _damaged),
    each(
        _checkpoints,
        ("checkpoint.set-aside", "steps that a resume quarantined", "docs/format.md"),
        kind="note",
        when=lambda c: c.set_aside,
        bites=_aside,
        why="An earlier resume started from an older step and renamed the newer ones, or found one damaged.",
        do="Compare with shardwise inspect PATH; delete those that you don't need, or resume from one by its path.",
    ),
    each(
        _checkpoints,
        ("checkpoint.leftovers", "leftovers from killed saves", "docs/concepts/publish.md"),
        kind="note",
        when=lambda c: c.leftovers,
        bites=lambda c: f"A save was killed or is under way: {some(c.leftovers)}.",
        why="These folders aren't steps; they take space until the next Checkpointer opens the directory and deletes them.",
        do="If no run writes here now, find out why the last one ended (memory, disk, time limit) before you start the next.",
    ),
    each(
        _checkpoints,
        (
            "checkpoint.per-rank",
            "one file per rank, without the shards' positions in the tensors",
            "accelerate#4105",
        ),
        when=lambda c: c.per_rank,
        bites=lambda c: (
            f"The checkpoint can be resumed at the same number of ranks only ({some(c.per_rank)})."
        ),
        why="Each file holds one rank's part without its place in the tensors (use_dcp=False).",
        do="Resume once with that number of ranks, and save with DCP (use_dcp=True) or with shardwise.",
    ),
    each(
        _lacking,
        (
            "checkpoint.incomplete",
            "a checkpoint-N without an optimizer, a scheduler, RNG state or a file that its neighbors have",
            "case 5; Trainer in transformers 5.23",
        ),
        when=lambda c: c.lost or c.lost_files,
        bites=_incomplete,
        why="A resume continues without these files and without an error. They were deleted, not copied, or the save was killed.",
        do="Resume from another checkpoint of the run, or copy the files from where this one came from.",
    ),
    Rule(
        "checkpoint.model-only",
        "a checkpoint-N saved with save_only_model",
        "Trainer in transformers 5.23",
        _only_noted,
        kind="note",
    ),
    Rule(
        "checkpoint.merge",
        "DCP parts larger than this host's free memory",
        "case 16; accelerate merge-weights",
        _merge,
        kind="note",
    ),
    each(
        _checkpoints,
        ("checkpoint.unfinished", "DCP parts without .metadata", "torch.distributed.checkpoint"),
        when=lambda c: c.lacks_metadata,
        bites="The checkpoint can't be loaded: it has parts of DCP and no .metadata.",
        why="Rank 0 writes that file last: the save was killed, or is still under way.",
        do="Use the previous checkpoint.",
    ),
    Rule("checkpoint.pickle", "pickled files", "case 20", _pickles, kind="note"),
)
