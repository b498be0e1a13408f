"""Rules over given models and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .facts import Facts
from .rule import Bite, Rule, gib, number

__all__ = ["FILES"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _lost(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        if model.lost:
            yield Bite(
                model.path,
                f"The model can't be loaded: {_some(model.lost)} {'is' if len(model.lost) == 1 else 'are'} not there.",
                "The index maps tensors to files that the directory lacks: a download or a copy was stopped.",
                "Fetch the directory again (hf download goes on where it stopped), or copy it with shardwise copy.",
            )


def _damaged(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        for name, how in model.damaged.items():
            yield Bite(
                f"{model.path}/{name}",
                f"The model can't be loaded: {name} is damaged or truncated ({how}).",
                "Its header and its size do not agree: a download ended early, or another file has its name.",
                "Delete the file, and fetch it again.",
            )


def _outside(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        if model.outside:
            yield Bite(
                model.path,
                f"Do not load this model: its index leads out of the directory ({_some(model.outside)}).",
                "A reader that trusts it opens any file that the user may read; only a damaged or hostile index does so.",
                "Delete the directory, and fetch it from a source that you trust.",
            )


def _pointers(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        if model.pointers:
            yield Bite(
                model.path,
                f"The model can't be loaded: {_some(model.pointers)} {'holds' if len(model.pointers) == 1 else 'hold'} "
                "no weights.",
                "It is a pointer of Git LFS: the repository was cloned without git-lfs.",
                "Run git lfs pull in it, or fetch it with hf download.",
            )


def _pickles(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        if model.pickles:
            yield Bite(
                model.path,
                f"torch.load of {_some(model.pickles)} can run any code that its writer put in.",
                "The weights are pickles, and no safetensors file stands beside them.",
                "Load with shardwise, which executes no pickle, or convert once: shardwise export PATH OUT.",
            )


def _problem(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        if model.problem is not None:
            yield Bite(
                model.path,
                f"The model can't be loaded: {model.problem.partition(chr(10))[0]}.",
                "Index and files do not belong together.",
                "See what is there with shardwise inspect PATH, and fetch the directory again.",
            )


def _experts(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        for config in (model.config, _inner(model.config)):
            count = next((found for n in _EXPERTS if (found := number(config.get(n)))), None)
            if count is not None and 1 < count < facts.ranks:
                yield Bite(
                    model.path,
                    f"Loaders crash or hang on empty shards: {count} experts over {facts.ranks} ranks.",
                    "FSDP2 cuts stacked experts by rows of dim 0, and some ranks get none.",
                    "Load and save with shardwise, which takes empty shards, or use expert or tensor parallelism.",
                )
                break


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config of several models."""
    found = config.get("text_config")
    return found if isinstance(found, Mapping) else {}


def _storage_dtype(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        quantized = model.config.get("quantization_config")
        if not isinstance(quantized, Mapping) or not quantized.get("load_in_4bit") or facts.ranks < 2:
            continue
        stored = str(quantized.get("bnb_4bit_quant_storage", "uint8"))
        if stored in ("uint8", "torch.uint8"):
            yield Bite(
                model.path,
                "QLoRA over FSDP crashes or trains nothing (loss 0.0): its 4-bit codes are stored as uint8.",
                "FSDP2 makes parameters of floating dtypes only, and loses the quantisation state of the rest.",
                "Load with sw.load_pretrained(quantized='keep'), which shards the codes (docs/howto/qlora.md), or set "
                "bnb_4bit_quant_storage to bfloat16.",
            )


def _unified(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is None or not memory.is_unified:
        return
    for model in facts.models:
        if model.nbytes <= memory.free_bytes < 2 * model.nbytes:
            yield Bite(
                model.path,
                f"Loading freezes the machine: host and device share {gib(memory.free_bytes)}, and the model has "
                f"{gib(model.nbytes)}.",
                "A copy on the host and the pages of the files stay beside the copy on the device.",
                "Load with sw.load_pretrained, which gives the pages back as it reads (docs/cases/4-unified-memory.md).",
            )


def _too_large(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    on_host = facts.machine.gpus == 0 or (memory is not None and memory.is_unified)
    if memory is None or not on_host:
        return
    for model in facts.models:
        if model.nbytes > memory.limit_bytes:
            yield Bite(
                model.path,
                f"The model does not fit on this host: {gib(model.nbytes)} of weights, {gib(memory.limit_bytes)} of memory.",
                f"The limit is {memory.limit_from}; ranks of one host share it, however they shard.",
                "Use more hosts, or a quantised model; shardwise plan PATH --ranks N says what each rank holds.",
            )


def _broken_steps(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        for name, how in checkpoint.damaged.items():
            yield Bite(
                f"{checkpoint.path}: {name}",
                f"A resume passes this step by, or fails: {how.partition(chr(10))[0]}",
                "Its files are not those that its manifest lists.",
                "See every step with shardwise verify PATH, and copy it again from a mirror if there is one.",
            )


def _aside(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        if checkpoint.set_aside:
            what = (
                "and no other is left to resume from" if not checkpoint.steps else "and they keep their bytes"
            )
            yield Bite(
                checkpoint.path,
                f"A resume counts {len(checkpoint.set_aside)} steps no more ({_some(checkpoint.set_aside)}), {what}.",
                "An earlier resume began at an older step and set the newer ones aside, or found one damaged.",
                "Compare with shardwise inspect PATH; delete what you do not want, or resume from one by its path.",
            )


def _leftovers(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        if checkpoint.leftovers:
            yield Bite(
                checkpoint.path,
                f"A save was killed or is under way: {_some(checkpoint.leftovers)}.",
                "Such folders are no steps; their bytes count until the next Checkpointer opens the directory and deletes them.",
                "If no run writes here now, look why the last one ended (memory, disk, time limit) before you start the next.",
            )


def _per_rank(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        if checkpoint.per_rank:
            yield Bite(
                checkpoint.path,
                f"The checkpoint can be resumed at the same number of ranks only ({_some(checkpoint.per_rank)}).",
                "Each file holds one rank's part without its place in the tensors (use_dcp=False, or an RL engine's own).",
                "Resume once where it was saved, and save there with DCP (use_dcp=True) or with shardwise.",
            )


def _pickled(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        if checkpoint.pickles:
            yield Bite(
                checkpoint.path,
                f"Opening this checkpoint can run any code that its writer put in: {_some(checkpoint.pickles)}.",
                "These files are pickles, and torch.load(weights_only=False) and DCP's reader execute them.",
                "If it is not your own, read it with shardwise alone: shardwise convert PATH OUT --to checkpoint.",
            )


def _unfinished(facts: Facts) -> Iterator[Bite]:
    for checkpoint in facts.checkpoints:
        if checkpoint.lacks_metadata:
            yield Bite(
                checkpoint.path,
                "The checkpoint can't be loaded: it has parts of DCP and no .metadata.",
                "Rank 0 writes that file last: the save was killed, or is still under way.",
                "Take the checkpoint before it.",
            )


def _rule(name: str, about: str, source: str, check: Callable[[Facts], Iterator[Bite]]) -> Rule:
    return Rule(id=name, about=about, source=source, check=check)


FILES = (
    _rule("model.lost-file", "the index names a file that is not there", "case 20", _lost),
    _rule("model.damaged-file", "a header that does not fit the file", "case 20; vllm#53537", _damaged),
    _rule("model.outside", "the index leads out of the directory", "case 20", _outside),
    _rule("model.lfs-pointer", "a pointer of Git LFS in place of weights", "git-lfs-pointer(5)", _pointers),
    _rule("model.pickle", "pickled weights alone", "case 20", _pickles),
    _rule("model.index", "index and files do not belong together", "case 12", _problem),
    _rule("model.few-experts", "fewer experts than ranks", "case 7", _experts),
    _rule("model.quant-storage", "bitsandbytes' 4 bits stored as uint8", "accelerate#3983", _storage_dtype),
    _rule("model.unified-memory", "twice the model over a shared memory", "case 4; Automodel#3532", _unified),
    _rule("model.too-large", "more bytes than the host's limit, without a device", "case 3", _too_large),
    _rule("checkpoint.damaged", "one of the newest steps is damaged", "docs/format.md", _broken_steps),
    _rule("checkpoint.set-aside", "steps that a resume set aside", "docs/format.md", _aside),
    _rule("checkpoint.leftovers", "leftovers of killed saves", "docs/concepts/publish.md", _leftovers),
    _rule("checkpoint.per-rank", "parts of single ranks", "accelerate#4105", _per_rank),
    _rule("checkpoint.pickle", "pickled files", "case 20", _pickled),
    _rule(
        "checkpoint.unfinished", "parts of DCP without .metadata", "torch.distributed.checkpoint", _unfinished
    ),
)
