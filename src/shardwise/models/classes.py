"""Finds the config and the model class of a directory, what the class declares, and outlines of hub models."""

from __future__ import annotations

import copy
import inspect
import json
import os
import re
import shutil
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..catalog.quantized import DESCRIBING
from ..catalog.records import refuse_config, refuse_foreign
from ..catalog.weights import ADAPTER_CONFIG, CONFIG_NAME, config_in, modules_in
from ..errors import FormatError, ShardwiseError, SourceError
from ..format.header import describe_steps
from ..internals.diffusers import class_of, is_diffusers_config
from ..internals.torch import (
    TorchDispatchMode,
    meta_tree,
    original_class,
    reset_methods,
    storage_key,
    written_tensors,
)
from ..internals.transformers import initializer_of, known_class, modules_cache, remote_class
from ..limits import MAX_CONFIG_COUNT, brief, inside, read_shallow_json, refuse_foreign_config
from ..names import exchange_parameter
from ..objects import frozen
from ..ranks.ranks import Ranks, patiently
from .documents import MODULES_NAME
from .meta import meta_init

# ----------------------------------------------------------------------------------------------------
# Finds the config and the model class of a directory.
#
# A directory may contain its classes, as Python files that ``auto_map`` in config.json names. They run only if the
# caller allows it; transformers never asks on the terminal.

T = TypeVar("T")


def home_of(directory: str) -> str:
    """The directory of config, code and tokenizer: itself, or the model's directory in a checkpoint."""
    nested = os.path.join(directory, "model")
    has_own = os.path.isfile(os.path.join(directory, "config.json"))
    return nested if not has_own and os.path.isfile(os.path.join(nested, "config.json")) else directory


def config_and_class(
    path: str | os.PathLike[str],
    config: Any = None,
    auto_class: Any = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A private copy of the config to build a model from, and its model class or Auto class.

    The config of a diffusers model is a dict. ``config`` and ``auto_class`` replace the directory's own. With ``trust_remote_code`` the directory's code takes
    precedence over transformers' classes, as in ``from_pretrained``.

    Raises :class:`SourceError` if there is no config, or only code that is not trusted or can't be imported;
    :class:`FormatError` if the config can't be read or no class is known.
    """
    directory = os.fspath(path)
    asked = directory if config is None else config
    of_diffusers = diffusers_config(asked) if isinstance(asked, str | os.PathLike) else asked
    if is_diffusers_config(of_diffusers):
        return dict(of_diffusers), _diffusers_class(of_diffusers, directory, auto_class)
    if config is None or isinstance(config, str | os.PathLike):
        config = read_config(
            directory if config is None else os.fspath(config),
            auto_class,
            trust_remote_code=trust_remote_code,
        )
    else:
        config = copy.deepcopy(config)  # building a model writes the dtype into its config
    return config, _class_of(config, directory, auto_class, trust_remote_code)


def diffusers_config(directory: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """The content of the ``config.json`` of a diffusers model; None if a local directory or checkpoint has none of diffusers.

    Raises :class:`FormatError` for one with endless lists.
    """
    home = home_of(os.fspath(directory))
    if not is_diffusers_config(config_in(home)):
        return None
    return _checked_document(os.path.join(home, CONFIG_NAME))


def _diffusers_class(config: Mapping[str, Any], directory: str, auto_class: Any) -> Any:
    """The class that a config of diffusers names, or the caller's. ``diffusers.AutoModel`` stands for the former."""
    if auto_class is not None and getattr(auto_class, "__name__", "") != "AutoModel":
        return auto_class
    try:
        found = class_of(config)
    except ImportError as error:
        raise ImportError(
            f"{directory}: is a diffusers model ({brief(config['_class_name'])}), and diffusers can't be imported: {error}; "
            f"pip install 'shardwise[diffusers]'"
        ) from error
    if found is None:
        import diffusers

        raise FormatError(
            f"names the class {brief(config['_class_name'])}, which is no model of diffusers {diffusers.__version__}; give auto_class=",
            path=os.path.join(home_of(directory), CONFIG_NAME),
        )
    return found


_NO_CONFIG = "no config.json; a transformers model directory has one"


def read_config(directory: str, auto_class: Any = None, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a local directory or checkpoint, as ``auto_class`` would read it.

    Its own Python files run only with ``trust_remote_code``. Raises :class:`SourceError` or :class:`FormatError`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

    if not os.path.isdir(directory):
        raise SourceError("no such directory; give a local model directory", path=directory)
    refuse_foreign(directory)
    home = home_of(directory)
    refuse_config(home)
    file = os.path.join(home, "config.json")
    if not os.path.isfile(file):
        raise SourceError(
            describe_steps(directory) or without_config(directory) or _NO_CONFIG, path=directory
        )
    _check_config(file, home)
    try:
        if config_class := _own_config_class(auto_class):
            return config_class.from_pretrained(home, local_files_only=True)
        document, _ = PreTrainedConfig.get_config_dict(home, local_files_only=True)
        code = code_of_auto_map(document.get("auto_map")).get("AutoConfig")
        if code and not trust_remote_code and document.get("model_type") not in CONFIG_MAPPING:
            raise _not_trusted(code, home)
        return AutoConfig.from_pretrained(home, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ShardwiseError, MemoryError):
        raise
    except Exception as error:
        # Config classes raise errors of many types for wrong fields, some not derived from ValueError.
        raise FormatError(
            f"not a config that transformers can read: {type(error).__name__}: {_first_of(str(error))}",
            path=file,
        ) from error


def without_config(directory: str) -> str:
    """What a directory without config.json holds instead of a transformers model, and the line to write; empty if that is not known."""
    if os.path.isfile(os.path.join(directory, ADAPTER_CONFIG)):
        return f"no config.json; it is an adapter ({ADAPTER_CONFIG}): give its base model, and adapter={directory!r}"
    for module in modules_in(directory):
        if (
            os.path.isfile(os.path.join(directory, module.folder, "config.json"))
            and "Transformer" in module.type
        ):
            return (
                f"no config.json; modules.json (sentence-transformers) says that the transformers model is in "
                f"{module.folder}: give subfolder={module.folder!r}"
            )
    return ""


#: Fields that count things of which config classes make lists.
_COUNTED = re.compile("layer|label|depth|block|head|expert|stage", re.IGNORECASE)


def _check_config(file: str, home: str) -> None:
    """Refuse configs that transformers would accept: with endless lists, or with files outside their directory."""
    document = _checked_document(file)
    refuse_foreign_config(home, file, document)
    others = (
        document.get("configuration_files") or []
    )  # by transformers' version; transformers joins these names to paths
    for name in others if isinstance(others, list) else [others]:
        other = inside(home, name)
        if "/" in name:
            raise FormatError(
                f"its configuration_files name {brief(name)}, which is not a file next to it", path=file
            )
        if os.path.isfile(other):
            refuse_foreign_config(home, other, _checked_document(other))


def _checked_document(file: str) -> dict[str, Any]:
    document = read_shallow_json(file, "config")
    if not isinstance(document, dict):
        raise FormatError("not a config that transformers can read: not a JSON object", path=file)
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, v) for v in value]
        elif isinstance(value, int) and value > MAX_CONFIG_COUNT and _COUNTED.search(key):
            raise FormatError(f"{brief(key)} is {brief(value)}, the limit is {MAX_CONFIG_COUNT}", path=file)
    return document


def _first_of(text: str) -> str:
    """The beginning of a text, which may be as long as a file."""
    return text if len(text) <= 2000 else f"{text[:2000]}…"


def _own_config_class(auto_class: Any) -> Any:
    """The config class of a concrete model class: a text model reads its part of a vision-language config."""
    return None if hasattr(auto_class, "from_config") else getattr(auto_class, "config_class", None)


def _class_of(config: Any, directory: str, auto_class: Any, trust_remote_code: bool) -> Any:
    if auto_class is not None and not hasattr(auto_class, "from_config"):
        return auto_class
    code = {
        k: v
        for k, v in code_of_auto_map(getattr(config, "auto_map", None)).items()
        if k.startswith("AutoModel")
    }
    if auto_class is None:
        key, known = _named_by_config(config, code)
    else:
        key, known = auto_class.__name__, known_class(auto_class, config)
    # What the caller registered for this config goes before the directory's code, as in from_pretrained.
    is_registered = isinstance(known, type) and not known.__module__.startswith("transformers.")
    if key in code and trust_remote_code and not is_registered:
        return _import(code[key], home_of(directory), key)
    if known is None and key in code:
        raise _not_trusted(code[key], home_of(directory))
    if auto_class is None and known is None:
        raise _unknown(config, directory, code)
    return auto_class or known


def _named_by_config(config: Any, code: Mapping[str, str]) -> tuple[str, Any]:
    """The first class that the config names: its Auto class in the directory's code, and transformers' class."""
    names = getattr(config, "architectures", None) or []
    names = [n for n in names if isinstance(n, str)] if isinstance(names, (list, tuple)) else []
    key = next((k for k, reference in code.items() if names[:1] == [reference.rpartition(".")[2]]), "")
    return key, next((found for n in names if (found := _model_class(n)) is not None), None)


def _model_class(name: str) -> Any:
    """transformers' model class or Auto class of this name; None for any other name."""
    import transformers

    try:
        found = getattr(transformers, name, None)
    except Exception:  # the attribute imports the class's module, which may fail in any way
        return None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model or hasattr(found, "from_config") else None


def _unknown(config: Any, directory: str, code: Mapping[str, str]) -> FormatError:
    import transformers

    hint = f" (the directory's own code is for {', '.join(code)})" if code else ""
    return FormatError(
        f"config names architectures {brief(getattr(config, 'architectures', None))}, and transformers {transformers.__version__} has none "
        f"of them; give auto_class={hint}",
        path=os.path.join(home_of(directory), "config.json"),
    )


def _import(reference: str, directory: str, key: str) -> Any:
    try:
        return remote_class(reference, directory, key)
    except MemoryError:
        raise
    except Exception as error:  # a repository's code may raise anything during its import
        raise SourceError(
            f"the model's own code ({reference}) can't be imported: {type(error).__name__}: {error}",
            path=directory,
        ) from error


def code_of_auto_map(auto_map: Any) -> dict[str, str]:
    """Auto class → ``[repository--]module.Class`` from a config's ``auto_map``, without tokenizers."""
    return {k: v for k, v in auto_map.items() if isinstance(v, str)} if isinstance(auto_map, dict) else {}


def _not_trusted(reference: str, directory: str) -> SourceError:
    return SourceError(
        f"the model's class is Python code that comes with it ({reference}), and none of it was run; read it, and if "
        f"you trust it pass trust_remote_code=True (on the command line --trust-remote-code)",
        path=directory,
    )


def import_code(path: str | os.PathLike[str]) -> None:
    """Run the Python files of a directory or checkpoint, if it has any for its classes."""
    if os.path.isfile(os.path.join(home_of(os.fspath(path)), "config.json")):
        config_and_class(path, trust_remote_code=True)


def in_turn(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run ``work``, which imports a model's code: on rank 0, then on one rank per cache of modules, then on the rest.

    transformers copies the code into a cache that ranks share, file by file and in place, so one rank could read a
    file while another writes it. It does not touch files already in the cache. Every rank must call it; raises alike
    on all.
    """
    label = "import the model's code"
    results: list[T] = []

    def turn(*, mine: bool) -> None:
        with ranks.agree(label):
            if mine and not results:
                results.append(work())

    turn(mine=ranks.rank == 0)

    def firsts(caches: list[str]) -> list[int]:
        return [caches.index(cache) for cache in set(caches)]

    own = ranks.combine(label, lambda: same_directory(modules_cache()), firsts)
    turn(mine=ranks.rank in own)
    turn(mine=True)
    return results[0]


def same_directory(directory: str) -> str:
    """A text that is equal on ranks that see the same directory through the same mount, and only on these."""
    patiently(os.makedirs, directory, exist_ok=True)
    found = os.stat(directory)
    return f"{socket.gethostname()}/{found.st_dev}/{found.st_ino}"


# ----------------------------------------------------------------------------------------------------
# Outlines of hub models, for a plan: config, index, code, and safetensors files that have the header and no payload.
#
# An outline's weights are files with holes: as long as the real ones, and almost nothing of them is on the disk.

#: Headers that are asked for at a time.
_AT_ONCE = 8


def documents_of_outline(names: Iterable[str]) -> list[str]:
    """Of the files that a load needs, those other than weights that a plan reads. Pure."""
    known = (CONFIG_NAME, ADAPTER_CONFIG, MODULES_NAME)
    return [n for n in names if os.path.basename(n) in known or n.endswith(".py") or _is_index(n)]


def _is_index(name: str) -> bool:
    """Whether a file lists the files of a model. diffusers puts a variant behind ``index``."""
    return ".index." in name and name.endswith(".json")


def outline(
    folder: str, model: str, revision: str | None, commit: str, names: Collection[str], common: dict[str, Any]
) -> str:
    """Make the outline of a hub model in ``folder``; returns its directory, whose name is the commit.

    ``names``: the files of the repository that a load needs. ``common``: arguments of ``hf_hub_download``. A source whose
    description is in its tensors, or in pickles, gets no weights: its config alone is planned. Raises :class:`SourceError` if
    ``revision`` is no longer that commit.
    """
    from huggingface_hub import HfApi, hf_hub_download

    here = _directory(folder, model, commit)
    for name in documents_of_outline(names):
        file = hf_hub_download(model, name, revision=revision, **common)  # the cache notes its commit
        if not file.endswith(os.path.join(commit, name)):
            raise SourceError(
                f"{revision or 'the main branch'} moved while it was downloaded; run again", path=model
            )
        _put(here, name, file)
    api = HfApi(token=common["token"], library_name=common["library_name"])
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    with ThreadPoolExecutor(_AT_ONCE, "shardwise-headers") as pool:
        headers = list(
            pool.map(
                lambda name: api.parse_safetensors_file_metadata(
                    model, name, revision=commit, token=common["token"]
                ),
                weights,
            )
        )
    if any(name.endswith(DESCRIBING) for header in headers for name in header.tensors):
        return here
    for name, header in zip(weights, headers, strict=True):
        _write_header(inside(here, name), header, model)
    return here


def outline_of_cache(folder: str, model: str, snapshot: str, subfolder: str) -> str | None:
    """The outline of what the cache has of a model without its weights; None if that lacks a config."""
    if not os.path.isfile(os.path.join(snapshot, subfolder, CONFIG_NAME)):
        return None
    here = _directory(folder, model, os.path.basename(snapshot))
    files = [os.path.relpath(os.path.join(at, n), snapshot) for at, _, ns in os.walk(snapshot) for n in ns]
    for name in documents_of_outline(files):
        if not _is_index(name):
            _put(here, name, os.path.join(snapshot, name))
    return here


def _directory(folder: str, model: str, commit: str) -> str:
    here = os.path.join(folder, model.replace("/", "--"), commit)
    os.makedirs(here, exist_ok=True)
    return here


def _put(here: str, name: str, file: str) -> None:
    target = inside(here, name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(file, target)


def _write_header(path: str, header: Any, model: str) -> None:
    """Write a safetensors file of a header that the hub sent; its payload is a hole."""
    entries: dict[str, Any] = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in header.tensors.items()
    }
    metadata = {"__metadata__": header.metadata} if header.metadata else {}
    text = json.dumps({**metadata, **entries}).encode()
    end = max((t.data_offsets[1] for t in header.tensors.values()), default=0)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"its {os.path.basename(path)} would have {end} bytes, and such a file can't be made: {error}",
            path=model,
        ) from error


# ----------------------------------------------------------------------------------------------------
# The model's own rules for initial values, found by watching them write on meta.
#
# A rule is a call: a module's ``reset_parameters()``, or ``_init_weights(module)`` of the nearest model around it
# that has one. Names do not tell which parameters a call writes. So all calls run once on an unsharded meta copy of the
# model, in the order of ordinary construction, under a dispatch mode that records every write. This also finds GPT-2's
# scaling of ``c_proj``, which happens in the call for the *whole model*.

# Operations that set every element without reading it: earlier writes no longer matter.
_OVERWRITES = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "normal",
        "random",
        "uniform",
        "zero",
    )
)


@frozen
class Template:
    """An unsharded meta copy of a model (or of a part of it), on which rules can run."""

    root: nn.Module
    path: str
    """Its path in the live model, as in ``named_modules``."""


@dataclass(eq=False, slots=True)
class Rule:
    """One call, and its writes to each parameter of the template, by id."""

    module: nn.Module
    call: Callable[[], object]
    written: dict[int, int] = field(default_factory=dict)
    """Elements written, counting repeats."""
    overwrites: set[int] = field(default_factory=set)
    """Parameters of which it first sets every element."""
    failure: str | None = None


def build_template(live: nn.Module, path: str) -> Template:
    """A fresh transformers model of the original class, from the live one's config, without wrappers."""
    with meta_init():
        root: nn.Module = original_class(live)(copy.deepcopy(live.config))
    _untie(root)
    return Template(root, path)


def copy_template(live: nn.Module) -> Template:
    """A copy of any module's tree, with the original classes and without hooks."""
    root = meta_tree(live)
    _untie(root)
    return Template(root, "")


def _untie(root: nn.Module) -> None:
    """Give every slot its own parameter: construction ties parameters only after each module was initialized."""
    seen: set[int] = set()
    for module in root.modules():
        for attribute, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) in seen:
                parameter = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                exchange_parameter(module, attribute, parameter)
            seen.add(id(parameter))


def rules_of(template: Template, calls: Iterable[Rule] | None = None) -> list[Rule]:
    """Every call that ordinary construction makes, in its order, with its writes. Draws no random numbers.

    ``calls``: calls to watch instead.
    """
    recorder = _Recorder(p for p in template.root.parameters() if p.is_meta)
    rules = [*_resets(template.root), *_init_weights(template.root)] if calls is None else [*calls]
    for rule in rules:
        recorder.watch(rule)
    return rules


def run_rules(rules: Iterable[Rule], parameters: Collection[torch.Tensor]) -> bool:
    """Run calls on parameters with memory. Returns whether they wrote to all of these."""
    recorder, written = _Recorder(parameters), set[int]()
    for rule in rules:
        run = Rule(rule.module, rule.call)
        recorder.call(run)
        written |= run.written.keys()
    return all(id(p) in written for p in parameters if p.numel())


def _resets(root: nn.Module) -> Iterator[Rule]:
    for module, _ in _children_first(root, None, set()):
        method = next(filter(_takes, reset_methods(module)), None)
        if method is not None:
            yield Rule(module, method)


def _init_weights(root: nn.Module) -> Iterator[Rule]:
    for module, giver in _children_first(root, None, set()):
        if giver is not None:
            yield Rule(module, partial(giver, module))


def _children_first(
    module: nn.Module, giver: Callable[[nn.Module], Any] | None, seen: set[int]
) -> Iterator[tuple[nn.Module, Callable[[nn.Module], Any] | None]]:
    """Every module once, children before parents, with the ``_init_weights`` of the nearest module around it that has one."""
    if id(module) in seen:
        return
    seen.add(id(module))
    method = initializer_of(module)
    if method is not None and _takes(method, module):
        giver = method
    for child in module.children():
        yield from _children_first(child, giver, seen)
    yield module, giver


def _takes(method: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


class _Recorder(TorchDispatchMode):
    """Notes, for one call at a time, the parameters whose storages it writes, through any view."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_storage = {storage_key(p): p for p in parameters}
        self._rule: Rule | None = None

    def call(self, rule: Rule) -> None:
        self._rule = rule
        with self, torch.no_grad():
            rule.call()

    def watch(self, rule: Rule) -> None:
        try:
            self.call(rule)
        except Exception as error:
            rule.failure = f"{type(error).__name__}: {error}".splitlines()[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._note(tensor, func.name().partition(".")[0])
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, operation: str) -> None:
        parameter = self._by_storage.get(storage_key(tensor))
        if parameter is None or self._rule is None:
            return
        key, written = id(parameter), self._rule.written
        if key not in written and operation in _OVERWRITES and tensor.numel() == parameter.numel():
            self._rule.overwrites.add(key)
        written[key] = written.get(key, 0) + tensor.numel()
