"""Every tokenizer and processor class of the installed transformers, built from tiny vocabularies, without a hub."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin

TEXT = ["the", "cat", "sat", "on", "a", "mat"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ROOT = Path(transformers.__file__).parent / "models"
_WORDS = (
    *("<s>", "<pad>", "</s>", "<unk>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "<mask>", "the", "cat", "sat", "on", "a"),
    *("mat", "Ġthe", "▁the", "th", "ca", "e</w>", "the</w>", "t", "h", "e", "c", "s", "o", "n", "m", "Ġ", "▁", "</w>"),
    *("<|startoftext|>", "<|endoftext|>", "__start__", "__end__", "__unk__", "__null__"),
)  # fmt: skip
_VOCABULARY = {word: index for index, word in enumerate(_WORDS)}


def declared_names() -> dict[str, set[str]]:
    """The file names that each tokenizer module declares, also of those that need packages which are not installed."""
    found: dict[str, set[str]] = {}
    for file in sorted(ROOT.glob("*/tokenization_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").endswith(
                "VOCAB_FILES_NAMES"
            ):
                found[file.stem] = {str(name) for name in ast.literal_eval(node.value).values()}
    return found


def classes(pattern: str, base: type) -> Iterator[type]:
    """The classes of transformers' model modules, without those whose module can't be imported here."""
    for file in sorted(ROOT.glob(f"*/{pattern}")):
        try:
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        except (ImportError, NameError):  # sentencepiece, pretty_midi, …
            continue
        for value in list(vars(module).values()):
            if inspect.isclass(value) and issubclass(value, base) and value.__module__ == module.__name__:
                yield value


def tokenizer_classes() -> list[type[PreTrainedTokenizerBase]]:
    return list(classes("tokenization_*.py", PreTrainedTokenizerBase))


def _word_level() -> str:
    made = Tokenizer(models.WordLevel(dict(_VOCABULARY), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return str(made.to_str())


def _with_counts(_: str) -> str:
    return "".join(f"{word} 9\n" for word in _WORDS[10:])


#: Name → a plausible file. What is not in it can't be written without its library: sentencepiece's models.
_FILES: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(
        ("vocab.json", "vocab-src.json", "vocab-tgt.json", "word_shape.json", "word_pronunciation.json"),
        lambda _: json.dumps(_VOCABULARY),
    ),
    "merges.txt": lambda _: "#version: 0.2\nt h\nth e</w>\nc a\n",
    "bpe.codes": lambda _: "t h 9\nth e</w> 8\n",
    "dict.txt": _with_counts,
    "vocab.txt": lambda kind: (
        _with_counts(kind) if kind in ("BertweetTokenizer", "PhobertTokenizer") else "\n".join(_WORDS)
    ),
    "prophetnet.tokenizer": lambda _: "\n".join(_WORDS),
    "emoji.json": lambda _: json.dumps({"emoji": {}, "emoji_inv": {}}),
    "byte_maps.json": lambda _: json.dumps({"decompose_map": {}, "merge_map": {}}),
    "entity_vocab.json": lambda _: json.dumps({"[UNK]": 0, "[PAD]": 1, "[MASK]": 2, "[MASK2]": 3}),
    "normalizer.json": lambda _: json.dumps({"colour": "color"}),
}
_SETTINGS = {"MarkupLMTokenizer": {"tags_dict": {"html": 0}}}


def write_tokenizer(kind: type[PreTrainedTokenizerBase], folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer of a class in a directory: by the files that the class declares, else as the class saves itself.

    Raises what the class raises.
    """
    folder.mkdir()
    names = set(kind.vocab_files_names.values()) - {"tokenizer_config.json"}
    settings = {"tokenizer_class": kind.__name__, **_SETTINGS.get(kind.__name__, {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name in names:
        if name in _FILES and not (name == "merges.txt" and "vocab.json" not in names | {"vocab-src.json"}):
            (folder / name).write_text(_FILES[name](kind.__name__))
    if names == {"tokenizer.json"}:
        (folder / "tokenizer.json").write_text(_word_level())
    try:
        return kind.from_pretrained(folder)
    except ImportError:
        raise
    except Exception:
        made = kind()
        made.chat_template = TEMPLATE
        made.save_pretrained(folder)
        return kind.from_pretrained(folder)


def ids_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What a tokenizer makes of words, some of them unknown, and of a conversation."""
    tokens = (
        [t for word in (*TEXT, "<unk>", "hut") for t in tokenizer.tokenize(word)]
        if hasattr(tokenizer, "tokenize")
        else []
    )
    ids = tokenizer.convert_tokens_to_ids(tokens)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    return tokens, ids, len(tokenizer), tokenizer.all_special_tokens, shown


def needs_a_package(error: BaseException) -> bool:
    """Whether a class can't be built for want of a package."""
    return isinstance(error, ImportError) or "torchvision" in str(error) or "torchaudio" in str(error)


# ----------------------------------------------------------------------------------------------------
# Processors


def processor_classes() -> list[type[ProcessorMixin]]:
    return list(classes("processing_*.py", ProcessorMixin))


def write_processor(kind: Any, folder: Path) -> None:
    """A processor of a class, saved by itself. Raises what the class raises."""
    tokens = dict.fromkeys(("image", "video", "audio"), None)
    special = {f"{one}_token": f"<{one}>" for one in tokens}
    for _ in range(20):
        parts = {one: _part(kind, one, special) for one in kind.get_attributes()}
        options = (
            {"chat_template": TEMPLATE}
            if "chat_template" in inspect.signature(kind.__init__).parameters
            else {}
        )
        try:
            kind(**parts, **options).save_pretrained(folder)
            return
        except AttributeError as error:  # its tokenizers have a special token of this name
            wanted = re.search(r"has no attribute '?(\w+_token)\b", str(error))
            if wanted is None or wanted[1] in special:
                raise
            special[wanted[1]] = f"<{wanted[1]}>"
    raise AssertionError(f"{kind.__name__} asks for ever more tokens")


def _part(kind: Any, attribute: str, special: Mapping[str, str]) -> Any:
    if "tokenizer" in attribute:
        made = Tokenizer(
            models.WordLevel({w: i for i, w in enumerate((*_WORDS, *special.values()))}, unk_token="<unk>")
        )
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(
            tokenizer_object=made,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            extra_special_tokens=dict(special),
        )
    if attribute == "image_processor":  # older transformers: the class without a suffix is that of PIL
        return getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)()
    if attribute == "feature_extractor":
        return transformers.WhisperFeatureExtractor()
    raise ImportError(f"{attribute} needs torchvision or torchaudio")
