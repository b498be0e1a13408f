"""Rules over given models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .facts import Facts, Model
from .rule import Bite, Rule, each, gib, number

__all__ = ["CUT_ON_DIM_0", "MODELS", "some"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Architectures whose conversion chunks, splits, concatenates, transposes or permutes dim 0: docs/supported-models.md.
CUT_ON_DIM_0 = frozenset(
    [
        "bailing_hybrid",
        "ernie4_5_vl_moe",
        "glm5_next",
        "glm5_next_text",
        "gradium_phonon_tts",
        "gte",
        "hrm_text",
        "jina_embeddings_v3",
        "kimi_k25",
        "kimi_linear",
        "minimax_m3_vl",
        "molmo2",
        "molmo2_text",
        "nemo_speechlm",
        "nemotron_h_omni",
        "nomic_bert",
        "olmo_hybrid",
        "qianfan_ocr",
        "radio",
        "rf_detr",
        "step3p7",
        "tipsv2",
        "tipsv2_dpt",
        "tipsv2_text_model",
        "tipsv2_vision_model",
        "unlimited_ocr",
    ]
)


def some(names: tuple[str, ...] | list[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _models(facts: Facts) -> Iterator[Model]:
    return iter(facts.models)


def _damaged(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        for name, how in model.damaged.items():
            yield Bite(
                f"{model.path}/{name}",
                f"The model can't be loaded: {name} is damaged or truncated ({how}).",
                "Its header doesn't match its size: a download ended early, or a different file has its name.",
                "Delete the file, and fetch it again.",
            )


def _experts(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        count = next((found for n in _EXPERTS if (found := number(model.text_config.get(n)))), None)
        if count is not None and 1 < count < facts.ranks:
            yield Bite(
                model.path,
                f"Loaders crash or hang on empty shards: {count} experts over {facts.ranks} ranks.",
                "FSDP2 cuts stacked experts by rows of dim 0, and some ranks get none.",
                "Load and save with shardwise, which takes empty shards, or use expert or tensor parallelism.",
            )


def _quant_storage(facts: Facts) -> Iterator[Bite]:
    for model in facts.models:
        quantized = model.config.get("quantization_config")
        if not isinstance(quantized, Mapping) or not quantized.get("load_in_4bit") or facts.ranks < 2:
            continue
        if str(quantized.get("bnb_4bit_quant_storage", "uint8")) in ("uint8", "torch.uint8"):
            yield Bite(
                model.path,
                "QLoRA over FSDP crashes or trains nothing (loss 0.0): its 4-bit codes are stored as uint8.",
                "FSDP2 makes parameters of floating dtypes only, and loses the quantization state of the rest.",
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
                "A copy on the host and the pages of the files stay in addition to the copy on the device.",
                "Load with sw.load_pretrained, which frees the pages as it reads (docs/cases/4-unified-memory.md).",
            )


def _too_large(facts: Facts) -> Iterator[Bite]:
    memory = facts.machine.memory
    if memory is None or (facts.machine.gpus and not memory.is_unified):
        return
    for model in facts.models:
        if model.nbytes > memory.limit_bytes:
            yield Bite(
                model.path,
                f"The model does not fit on this host: {gib(model.nbytes)} of weights, {gib(memory.limit_bytes)} of memory.",
                f"The limit is {memory.limit_from}; ranks of one host share it, however they shard.",
                "Use more hosts, or a quantized model; shardwise plan PATH --ranks N says what each rank holds.",
            )


MODELS = (
    each(
        _models,
        ("model.lost-file", "the index lists a file that doesn't exist", "case 20"),
        when=lambda m: m.lost,
        bites=lambda m: (
            f"The model can't be loaded: {some(m.lost)} {'is' if len(m.lost) == 1 else 'are'} not there."
        ),
        why="The index maps tensors to files that the directory lacks: a download or a copy was interrupted.",
        do="Fetch the directory again (hf download continues where it stopped), or copy it with shardwise copy.",
    ),
    Rule("model.damaged-file", "a header that doesn't match its file", "case 20; vllm#53537", _damaged),
    each(
        _models,
        ("model.outside", "the index points outside the directory", "case 20"),
        when=lambda m: m.outside,
        bites=lambda m: f"Do not load this model: its index leads out of the directory ({some(m.outside)}).",
        why="A reader that trusts it opens any file that the user may read; only a damaged or hostile index does so.",
        do="Delete the directory, and fetch it from a source that you trust.",
    ),
    each(
        _models,
        ("model.lfs-pointer", "a Git LFS pointer instead of weights", "git-lfs-pointer(5)"),
        when=lambda m: m.pointers,
        bites=lambda m: (
            f"The model can't be loaded: {some(m.pointers)} {'holds' if len(m.pointers) == 1 else 'hold'} no weights."
        ),
        why="It is a pointer of Git LFS: the repository was cloned without git-lfs.",
        do="Run git lfs pull in it, or fetch it with hf download.",
    ),
    each(
        _models,
        ("model.pickle", "weights only as pickles", "case 20"),
        kind="note",
        when=lambda m: m.pickles,
        bites=lambda m: f"torch.load of {some(m.pickles)} can run any code that its author put in.",
        why="The weights are pickles, and there is no safetensors file next to them.",
        do="Load with shardwise, which executes no pickle, or convert once: shardwise export PATH OUT.",
    ),
    each(
        _models,
        ("model.index", "the index and the files don't match", "case 12"),
        when=lambda m: m.problem,
        bites=lambda m: f"The model can't be loaded: {(m.problem or '').partition(chr(10))[0]}.",
        why="Index and files do not belong together.",
        do="See what is there with shardwise inspect PATH, and fetch the directory again.",
    ),
    each(
        _models,
        (
            "model.two-formats",
            "a model that is partly safetensors, partly pickled",
            "from_pretrained of transformers 5.23",
        ),
        when=lambda m: m.only_pickled,
        bites=lambda m: (
            f"A load lacks {len(m.only_pickled)} tensors, which are in pickles alone: {some(m.only_pickled)}."
        ),
        why="from_pretrained reads files of one format: safetensors where there are any. The pickles hold other tensors than those.",
        do="Fetch the directory again, or put all tensors into files of one format.",
    ),
    each(
        _models,
        ("model.lost-base", "an adapter whose base model doesn't exist", "PeftModel in peft 0.21"),
        when=lambda m: m.base,
        bites=lambda m: f"The adapter can't be loaded by its config: its base {m.base} is not there.",
        why="adapter_config.json names it as base_model_name_or_path: the base was moved, or trained on another machine.",
        do="Load the base from where it is, and give the adapter to sw.load_pretrained(BASE, adapter=PATH).",
    ),
    each(
        _models,
        (
            "model.internal-names",
            "tensor names with a wrapper's prefix (_orig_mod, base_model.model, …)",
            "case 16; case 10",
        ),
        when=lambda m: m.wrapped,
        bites=lambda m: (
            f"from_pretrained leaves the weights random: it looks for other names than {some(m.wrapped)}."
        ),
        why="The model was saved through a wrapper (torch.compile, DDP, FSDP, PEFT), whose names ended up in the files.",
        do="Export it from the checkpoint with shardwise export PATH OUT, which writes the hub's names.",
    ),
    each(
        _models,
        ("model.adapter-slice", "LoRA matrices whose rank differs from adapter_config.json", "case 10"),
        when=lambda m: m.slices,
        bites=lambda m: f"The adapter can't be loaded, or is incomplete: {some(m.slices)}.",
        why="One rank saved its own slice of each sharded matrix.",
        do="Save it again from all ranks: sw.export_hf writes PEFT's files (docs/howto/peft.md).",
    ),
    each(
        _models,
        (
            "model.conversion",
            "an architecture whose conversion splits dim 0",
            "case 6; docs/supported-models.md",
        ),
        kind="note",
        applies={"transformers": ">=5.0"},
        when=lambda m: str(m.config.get("model_type")) in CUT_ON_DIM_0,
        bites=lambda m: (
            f"transformers' own sharded load (tp_plan, DistributedConfig) can give wrong weights without an error: "
            f"{m.config['model_type']}."
        ),
        why="It slices stored tensors first and then splits or joins them on the sharded dim.",
        do="Load with sw.load_pretrained, which converts before it cuts; every architecture is compared bit for bit.",
    ),
    Rule("model.few-experts", "fewer experts than ranks", "case 7", _experts),
    Rule(
        "model.quant-storage", "4-bit bitsandbytes weights stored as uint8", "accelerate#3983", _quant_storage
    ),
    Rule(
        "model.unified-memory",
        "twice the model's size exceeds the memory that host and device share",
        "case 4; Automodel#3532",
        _unified,
    ),
    Rule(
        "model.too-large", "no device, and a model larger than the host's memory limit", "case 3", _too_large
    ),
)
