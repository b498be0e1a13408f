"""Checkpoints whose names have a prefix too much or too little, or that hold more or less than what is wanted.

Where ``from_pretrained`` finds the weights, ours are bitwise the same; where it drops some with a warning or leaves
some random, ours is one error until that is declared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import RankPool
from tests.planning._prefixes_fns import SOURCES, Reader, hinted, read, write_source


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        write_source(name, root / name)
    return {name: root / name for name in SOURCES}


def with_sources(rows: list[tuple[Any, ...]], *kept: str) -> list[Any]:
    """The rows as parameters; those of other sources than ``kept`` are slow."""
    return [row if row[0] in kept else pytest.param(*row, marks=pytest.mark.nightly) for row in rows]


#: Nothing to declare: names are mapped, or the model's class says itself what may be left.
COMPLETE = [
    ("qwen3-base", Reader("AutoModel")),
    ("qwen3-tied-base", Reader("AutoModelForCausalLM")),
    ("bert-legacy", Reader("AutoModel")),
    ("gpt2", Reader("AutoModel")),
    ("gpt2-base", Reader("AutoModelForCausalLM")),
    ("wav2vec2-legacy", Reader("AutoModel")),
    ("moe-wrapped", Reader("AutoModelForCausalLM", key_mapping={r"^net\.": ""})),
    ("llava", Reader("LlavaForConditionalGeneration")),
    ("llava-new", Reader("LlavaForConditionalGeneration")),
    ("gemma3", Reader("AutoModelForCausalLM")),
    ("gemma3", Reader("AutoModel")),
    ("gemma3-doubled", Reader("Gemma3ForConditionalGeneration")),
    ("qwen3.5", Reader("AutoModelForCausalLM")),
    ("qwen2-vl", Reader("Qwen2VLForConditionalGeneration")),
    ("qwen3-vl-moe", Reader("Qwen3VLMoeForConditionalGeneration")),
]


@pytest.mark.parametrize(
    ("source", "reader"),
    with_sources(COMPLETE, "gpt2", "moe-wrapped", "gemma3-doubled"),
    ids=lambda v: getattr(v, "model_class", v),
)
def test_complete(ranks: RankPool, sources: dict[str, Path], source: str, reader: Reader) -> None:
    for outcome in ranks.run_ranks(2, read, str(sources[source]), reader):
        assert outcome.loaded
        assert outcome.problems == ()
        assert outcome.random == outcome.dropped == 0
        assert outcome.initialized == ()
        assert bool(outcome.unused) == (source == "qwen3.5")  # the vision tower, says Qwen3_5ForCausalLM


_VLM = ("model.visual.*", "lm_head.weight")

#: from_pretrained drops stored tensors with a warning: how many, and how many lines the error takes for them.
DROPPED = [
    ("qwen3", Reader("AutoModel", allow_unused=("lm_head.weight",)), 1, 1),
    ("moe", Reader("AutoModel", allow_unused=("lm_head.*",)), 1, 1),
    ("llava", Reader("LlavaModel", allow_unused=("language_model.lm_head.*",)), 1, 1),
    ("qwen3.5", Reader("Qwen3_5TextModel", allow_unused=_VLM), 22, 2),
    ("qwen2-vl", Reader("Qwen2VLTextModel", allow_unused=("visual.*", "lm_head.*")), 20, 2),
    (
        "llava",
        Reader(
            "LlamaForCausalLM", key_mapping={r"^language_model\.": ""}, allow_unused=("vision*", "multi*")
        ),
        43,
        5,
    ),
    ("qwen3-vl-moe", Reader("Qwen3VLMoeTextModel", None, {r"^model\.language_model\.": ""}, _VLM), 28, 2),
]


@pytest.mark.parametrize(
    ("source", "reader", "dropped", "lines"),
    with_sources(DROPPED, "qwen3", "qwen3.5", "qwen2-vl"),
    ids=lambda v: getattr(v, "model_class", v),
)
def test_dropped(
    ranks: RankPool, sources: dict[str, Path], source: str, reader: Reader, dropped: int, lines: int
) -> None:
    for outcome in ranks.run_ranks(2, read, str(sources[source]), reader):
        assert (outcome.random, outcome.dropped, len(outcome.unused)) == (0, dropped, dropped)
        assert len(outcome.problems) == lines
        assert all(p.startswith("unused: ") for p in outcome.problems)
        assert outcome.loaded
        assert outcome.initialized == ()


#: from_pretrained leaves what is not stored random.
RANDOM = [
    ("qwen3-base", Reader("AutoModelForCausalLM", allow_missing=("lm_head.weight",)), 1),
    ("moe-base", Reader("AutoModelForCausalLM", allow_missing=("lm_head.weight",)), 1),
    (
        "bert-masked",
        Reader(
            "AutoModelForSequenceClassification",
            allow_unused=("cls.*",),
            allow_missing=("*pooler.*", "classifier.*"),
        ),
        4,
    ),
    ("bert-base", Reader("AutoModelForMaskedLM", allow_unused=("pooler.*",), allow_missing=("cls.*",)), 6),
    (
        "qwen2",
        Reader("Qwen2VLForConditionalGeneration", config="qwen2-vl", allow_missing=("model.visual.*",)),
        19,
    ),
]


@pytest.mark.parametrize(
    ("source", "reader", "random"),
    with_sources(RANDOM, "moe-base", "bert-base"),
    ids=lambda v: getattr(v, "model_class", v),
)
def test_random(ranks: RankPool, sources: dict[str, Path], source: str, reader: Reader, random: int) -> None:
    for outcome in ranks.run_ranks(2, read, str(sources[source]), reader):
        assert outcome.loaded
        assert outcome.random == random
        assert sum(p.startswith("missing: ") for p in outcome.problems) == len(outcome.initialized) > 0


#: from_pretrained finds nothing of the text model and leaves it random with a warning; how many parameters that are.
LOST = [
    ("llava", Reader("LlamaForCausalLM", allow_unused=("vision*", "multi*")), 21),
    ("llava-new", Reader("LlamaModel", allow_unused=("model.vision*", "model.multi*", "lm_head.*")), 20),
    ("qwen3-vl-moe", Reader("Qwen3VLMoeTextModel", allow_unused=_VLM), 24),
    ("gemma3", Reader("Gemma3ForCausalLM", allow_unused=("vision*", "multi*")), 29),
    ("moe-wrapped", Reader("AutoModelForCausalLM"), 25),
    (
        "gemma3-text",
        Reader(
            "Gemma3ForConditionalGeneration",
            "gemma3",
            allow_missing=("*vision*", "*multi*", "*embed_vision*"),
        ),
        79,
    ),
]


@pytest.mark.parametrize(
    ("source", "reader", "random"),
    with_sources(LOST, "llava", "qwen3-vl-moe", "moe-wrapped"),
    ids=lambda v: getattr(v, "model_class", v),
)
def test_lost(ranks: RankPool, sources: dict[str, Path], source: str, reader: Reader, random: int) -> None:
    found = ranks.run_ranks(2, read, str(sources[source]), reader)
    for outcome in found:
        assert outcome == found[0]
        assert not outcome.loaded
        assert outcome.random == random
        assert outcome.problems[0].startswith("prefix: ")
    for mapping, outcome in ranks.run_ranks(2, hinted, str(sources[source]), reader):
        assert outcome.loaded, outcome.problems
        assert outcome.random == len(outcome.initialized) < random, mapping
