"""The documents of a model's directory: every small file that is neither weights nor the state of a run.

No list says which files a tokenizer, a processor or a library on top has: classes name their own, and new ones come with each
release. Weights and training states are recognized by their names; the rest belongs to the model.
"""

from __future__ import annotations

import json
import logging
import mimetypes
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache

from ..errors import SourceError
from ..limits import inside, is_inside, leads_out, read_small

_log = logging.getLogger(__name__)

#: Of one document, and of all of them. The largest tokenizers have about 35 MB.
MAX_DOCUMENT_BYTES, MAX_DOCUMENTS_BYTES = 64 * 1024**2, 256 * 1024**2
#: sentence-transformers' list of modules; each may have a folder of its own, with weights.
MODULES_NAME = "modules.json"
#: transformers' folder of additional templates, and that of a model's own ``generate``.
_TEMPLATES, _GENERATE = "additional_chat_templates", "custom_generate"
#: pyctcdecode's decoder: its alphabet, and the folder of its language model. kenlm's file in it may have any name.
ALPHABET, LANGUAGE_MODEL = "alphabet.json", "language_model"
#: What a folder of one part of a processor has, such as ``qformer_tokenizer/``.
_PARTS = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
#: What says that a folder is a model of its own, such as ``checkpoint-500/``.
_OTHER_MODELS = ("config.json", "adapter_config.json")
_MAX_DEPTH, _MAX_MODULES, _MAX_MODULES_BYTES = 3, 64, 1024**2
#: Files in folders that documents name. Bark's presets are about 400; a JSON file that names files is far smaller than a tokenizer.
_MAX_NAMED, _MAX_NAMING_BYTES = 4096, 1024**2
#: Arrays are a processor's own if a document names them, such as Bark's presets.
_ARRAYS = (".npy", ".npz")

#: Endings of weights and pickled states.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".msgpack", ".h5", ".onnx", ".onnx_data", ".ot"),
    *(".tflite", ".mlmodel", ".nemo", ".pb", ".npz", ".npy", ".pkl", ".pickle", ".joblib", ".distcp", ".parquet", ".arrow"),
)  # fmt: skip
#: Descriptions of weights that are not this model's, or not in this form, and of runs: a reader would take them for its own.
_OF_OTHERS = frozenset(
    {
        *("adapter_config.json", "adapters.json", "quantize_config.json", "quant_config.json"),
        *("hf_quant_config.json", "trainer_state.json", "manifest.json", "state.json", "head.json"),
        *("latest", "latest_checkpointed_iteration.txt"),
    }
)
#: Names of keys and passwords. ``tokens.txt`` is none: some models' vocabulary has this name.
_SECRET = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)(_sk)?|token|[._]?netrc|htpasswd|(.*[._-])?credentials?([._-].*)?|.*\.(pem|key|p12|pfx|kdbx|jks)"
    r"|((.*[._-])?(private|secret|access|api|ssh)[_-]?key|secrets?)(\.(json|txt|ya?ml|toml|ini))?",
    re.IGNORECASE,
)
_TEXTS = re.compile(r"text/.*|application/(.*[+.-])?(json|xml|yaml|toml|javascript)")


@cache
def _types() -> mimetypes.MimeTypes:
    """Python's own table of types: that of the machine may differ between ranks."""
    return mimetypes.MimeTypes()


def is_document(name: str) -> bool:
    """Whether a file with this name, without folders, belongs to a model: no weights, state, code, media or archive. Pure."""
    if name.startswith((".", "~", "events.out.tfevents.")) or name.endswith(
        ("~", ".py", ".tmp", ".lock", *_WEIGHTS)
    ):
        return False
    if ".index." in name or name in _OF_OTHERS or _SECRET.fullmatch(name):
        return False
    kind, packed = _types().guess_type(name)
    return packed is None and (kind is None or _TEXTS.fullmatch(kind) is not None)


def documents_among(
    names: Iterable[str], modules: Collection[str] = (), named: Collection[str] = ()
) -> list[str]:
    """The documents among the files of a directory, by relative names. ``modules``: as :func:`modules_in`. ``named``: as
    :func:`named_by_documents`. Pure.

    Files at the top; the folders of further templates and of parts of a processor; files that a document names; and of
    sentence-transformers' modules and a decoder's language model everything, weights included, because no other file has them.
    """
    known = set(names)
    modules = _whole_folders(known, modules)
    folders = {name.rpartition("/")[0] for name in known} - {""}
    parts = {
        folder
        for folder in folders
        if "/" not in folder
        and any(f"{folder}/{one}" in known for one in _PARTS)
        and not any(f"{folder}/{one}" in known for one in _OTHER_MODELS)
    }

    def belongs(name: str) -> bool:
        folder, _, base = name.rpartition("/")
        if any(part.startswith(".") for part in name.split("/")):
            return False
        if any(f"{folder}/".startswith(f"{module}/") for module in modules):
            return not base.endswith(".py")
        if folder == _TEMPLATES:
            return base.endswith(".jinja")
        if name in named:
            return is_document(base) or (base.endswith(_ARRAYS) and not _SECRET.fullmatch(base))
        return (not folder or folder in parts) and is_document(base)

    return [name for name in sorted(known) if is_inside(name) and belongs(name)]


def _whole_folders(names: Collection[str], modules: Iterable[str]) -> list[str]:
    """The folders whose files all belong to the model."""
    return [*modules, *([LANGUAGE_MODEL] if ALPHABET in names else [])]


def named_by_documents(documents: Mapping[str, bytes], folders: Collection[str]) -> list[str]:
    """The paths in some of ``folders`` that the JSON documents at the top of a directory have as values. Pure.

    So a processor names the files that it keeps in a folder, such as Bark's ``speaker_embeddings_path.json``.
    """
    found: dict[str, None] = {}
    for name, content in documents.items():
        if not folders or "/" in name or not name.endswith(".json") or len(content) > _MAX_NAMING_BYTES:
            continue
        try:
            waiting = [json.loads(content)]
        except (ValueError, RecursionError):
            continue
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list):
                waiting += value.values() if isinstance(value, dict) else value
            elif (
                isinstance(value, str)
                and value.partition("/")[0] in folders
                and 1 <= value.count("/") <= _MAX_DEPTH
                and is_inside(value)
            ):
                found[value] = None
    return sorted(found)[:_MAX_NAMED]


def named_in(folder: str, folders: Collection[str]) -> list[str]:
    """:func:`named_by_documents` of a local directory's documents, without those that lead out of it. Of what may not exist."""
    documents: dict[str, bytes] = {}
    for name in sorted(os.listdir(folder)) if folders else ():
        path = os.path.join(folder, name)
        nbytes, why = _size_of(folder, path)
        if name.endswith(".json") and is_document(name) and not why and nbytes <= _MAX_NAMING_BYTES:
            documents[name] = read_small(path, name)
    named = named_by_documents(documents, folders)
    return documents_among(named, named=named)


def modules_in(document: bytes) -> list[str]:
    """The folders that sentence-transformers' ``modules.json`` names, at most 64. Empty for a file that is none."""
    if len(document) > _MAX_MODULES_BYTES:
        return []
    try:
        paths = [one["path"] for one in json.loads(document)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    named = dict.fromkeys(path.rstrip("/") for path in paths if isinstance(path, str))
    return [path for path in named if is_inside(path)][:_MAX_MODULES]


def read_documents(folder: str, *, without: Collection[str] = ()) -> dict[str, bytes]:
    """The documents of a local directory, by relative name, except those in ``without``.

    Left out, and named in a warning: links that lead out of the directory, what is no regular file or may not be read, what is
    too large, and files with the names of keys. Raises :class:`SourceError` if the directory or a file can't be read.
    """
    found, left = _read(folder, without)
    _tell(folder, left)
    return found


def left_out_of(folder: str) -> tuple[str, ...]:
    """The documents of a local directory that :func:`read_documents` leaves out, each with the reason."""
    return _read(folder, ())[1]


def _read(folder: str, without: Collection[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    modules = modules_in(_modules_file(folder))
    names = list(_names_in(folder, modules))
    found: dict[str, bytes] = {}
    left = [f"{name} (its name is that of a key)" for name in names if _SECRET.fullmatch(name)]
    total = 0

    def take(chosen: Iterable[str]) -> None:
        nonlocal total
        for name in chosen:
            path = os.path.join(folder, name)
            nbytes, why = _size_of(folder, path)
            if nbytes > MAX_DOCUMENT_BYTES or total + nbytes > MAX_DOCUMENTS_BYTES:
                why = f"{nbytes} bytes"
            if why and not (
                name == "config.json" and nbytes > MAX_DOCUMENT_BYTES
            ):  # without one there is no model: its reader raises
                left.append(f"{name} ({why})")
                continue
            found[name] = read_small(path, name, MAX_DOCUMENT_BYTES)
            total += nbytes

    first = documents_among(names, modules)
    take(name for name in first if name not in without)
    named = [
        name
        for name in named_by_documents(found, _folders_in(folder))
        if os.path.lexists(os.path.join(folder, name)) and not os.path.isdir(os.path.join(folder, name))
    ]
    more = documents_among({*names, *named}, modules, named)
    take(name for name in more if name not in without and name not in first)
    return found, tuple(left)


def _folders_in(folder: str) -> list[str]:
    found = [(name, os.path.join(folder, name)) for name in os.listdir(folder)]
    return [name for name, path in found if os.path.isdir(path) and not leads_out(folder, path)]


def _size_of(folder: str, path: str) -> tuple[int, str]:
    """Size of a file of a directory, and why it can't be taken, if so."""
    if leads_out(folder, path):
        return 0, "a link out of the directory"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return 0, "not a regular file"
        return status.st_size, "" if os.access(path, os.R_OK) else "no permission to read it"
    except OSError as error:
        return 0, error.strerror or type(error).__name__


@cache
def _tell(folder: str, left: tuple[str, ...]) -> None:
    """Once for each directory and list: a run saves often."""
    if left:
        _log.warning(
            "%s: not written for this model: %s. If the model needs them, put the files themselves into the "
            "directory, at most %d MiB each, under names that don't look like keys",
            folder,
            ", ".join(left[:20]) + (f" and {len(left) - 20} more" if len(left) > 20 else ""),
            MAX_DOCUMENT_BYTES // 1024**2,
        )


def _modules_file(folder: str) -> bytes:
    path = os.path.join(folder, MODULES_NAME)
    return read_small(path, MODULES_NAME) if os.path.isfile(path) and not leads_out(folder, path) else b""


def _names_in(folder: str, modules: Iterable[str]) -> Iterator[str]:
    """Names of the files in a directory and in the folders that may have documents; other folders are not listed."""
    try:
        top = sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror}", path=folder) from error
    for name in top:
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            yield name
        elif name == _TEMPLATES or any(os.path.isfile(os.path.join(path, one)) for one in _PARTS):
            yield from (f"{name}/{one}" for one in sorted(os.listdir(path)))
    yield from files_below_modules(folder, _whole_folders(top, modules))


def files_below_modules(folder: str, modules: Iterable[str]) -> Iterator[str]:
    """Names of the files in folders of a directory, at most four folders deep. Links to folders outside it are not followed."""
    for module in modules:
        root = inside(folder, module)
        if leads_out(folder, root):
            continue
        for at, folders, files in os.walk(root):
            if os.path.relpath(at, root).count(os.sep) >= _MAX_DEPTH:
                folders.clear()
            yield from (
                os.path.relpath(os.path.join(at, one), folder).replace(os.sep, "/") for one in sorted(files)
            )


# ----------------------------------------------------------------------------------------------------
# Code


def code_of(folder: str, documents: Mapping[str, bytes]) -> dict[str, bytes]:
    """The Python files that ``auto_map`` in a document of a directory names, those of its own ``generate``, and what they import
    there: name → content. Runs no code."""
    left: list[str] = []

    def read(name: str) -> bytes | None:
        path = inside(folder, name)
        if not os.path.isfile(path):
            return None
        if leads_out(folder, path):
            left.append(f"{name} (a link out of the directory)")
            return None
        return read_small(path, name)

    found: dict[str, bytes] = {}
    for content in documents.values():
        for module in _modules_of(content):
            found |= with_imports(f"{module}.py", read)
    own = with_imports(f"{_GENERATE}/generate.py", read)
    if own and (needed := read(f"{_GENERATE}/requirements.txt")) is not None:
        own[f"{_GENERATE}/requirements.txt"] = needed
    _tell(folder, tuple(sorted(set(left))))
    return found | own


def _modules_of(document: bytes) -> list[str]:
    """The modules that ``auto_map`` of a JSON document names, without those of other repositories (``repo--…``)."""
    try:
        auto_map = json.loads(document)["auto_map"]
        references = [
            r for value in auto_map.values() for r in (value if isinstance(value, list) else [value])
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    modules = (r.partition(".")[0] for r in references if isinstance(r, str))
    return [m for m in modules if re.fullmatch(r"\w+", m)]


#: As transformers' ``get_relative_imports``.
_RELATIVE_IMPORT = re.compile(rb"^\s*(?:from\s+\.(\w+)\s+import|import\s+\.(\w+)\s*$)", re.MULTILINE)


def with_imports(first: str, read: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """A Python file and its sibling files that it imports, directly or not: name → content. ``read`` gives None if there is none."""
    folder = first.rpartition("/")[0]
    found: dict[str, bytes] = {}
    pending = {first}
    while pending:
        more = {name: content for name in sorted(pending) if (content := read(name)) is not None}
        found |= more
        imported = {
            "/".join(filter(None, [folder, f"{(one or other).decode()}.py"]))
            for content in more.values()
            for one, other in _RELATIVE_IMPORT.findall(content)
        }
        pending = imported - found.keys() - pending
    return found
