"""Finds the config and the model class of a directory.

A directory may contain its classes, as Python files that ``auto_map`` in config.json names. They run only if the
caller allows it; transformers never asks on the terminal.
"""

from __future__ import annotations

import copy
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ..catalog.kinds import refuse_config, refuse_foreign
from ..catalog.modules import modules_in
from ..catalog.weights import ADAPTER_CONFIG
from ..errors import FormatError, ShardwiseError, SourceError
from ..format.steps import describe_steps
from ..internals.transformers import known_class, modules_cache, remote_class
from ..limits import MAX_CONFIG_COUNT, brief, inside, read_shallow_json, refuse_foreign_config
from ..ranks.patience import patiently
from ..ranks.ranks import Ranks

__all__ = [
    "code_of_auto_map",
    "config_and_class",
    "home_of",
    "import_code",
    "in_turn",
    "read_config",
    "same_directory",
    "without_config",
]

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

    ``config`` and ``auto_class`` replace the directory's own. With ``trust_remote_code`` the directory's code takes
    precedence over transformers' classes, as in ``from_pretrained``.

    Raises :class:`SourceError` if there is no config, or only code that is not trusted or can't be imported;
    :class:`FormatError` if the config can't be read or no class is known.
    """
    directory = os.fspath(path)
    if config is None or isinstance(config, str | os.PathLike):
        config = read_config(
            directory if config is None else os.fspath(config),
            auto_class,
            trust_remote_code=trust_remote_code,
        )
    else:
        config = copy.deepcopy(config)  # building a model writes the dtype into its config
    return config, _class_of(config, directory, auto_class, trust_remote_code)


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
        f"config names architectures {brief(getattr(config, 'architectures', None))}, and none of them is in transformers "
        f"{transformers.__version__} has; give auto_class={hint}",
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
