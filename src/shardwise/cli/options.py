"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from typing import Any

import click

__all__ = [
    "DTYPES",
    "AnyPath",
    "as_load_pretrained",
    "byte_count",
    "check_axes",
    "common",
    "config",
    "debug",
    "memory_size",
    "model_class",
    "new_adapter",
    "quantized_as",
    "one_model",
    "source_path",
    "trust_remote_code",
]


class AnyPath(click.Path):
    """A path or URL, which need not exist; click's own fails with a traceback where it has a NUL character."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "\0" in str(value):
            self.fail("a path can't contain a NUL character", param, ctx)
        return super().convert(value, param, ctx)


#: The dtypes in which a model can be built or exported.
DTYPES = ("bfloat16", "float16", "float32", "float64")

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[Ee]\+?\d{1,2})?)\s*([A-Za-z]*)\s*")
#: More bytes than this are a mistake, and do not fit into the numbers of other tools.
_LIMIT_BYTES = 2**63


def byte_count(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A number of bytes from ``500MB`` (powers of 1000), ``5GiB`` (powers of 1024), or a plain number, also as ``2e9``."""
    found = _SIZE.fullmatch(value)
    unit = _UNITS.get(found[2].upper()) if found else None
    nbytes = int(float(found[1]) * unit) if found and unit and len(found[1]) < 16 else 0
    if not 1 <= nbytes < _LIMIT_BYTES:
        raise click.BadParameter(
            f"{value!r} is not a size; write, for example, 5GB, 500MiB or a number of bytes (2000000000, 2e9)",
            context,
            parameter,
        )
    return nbytes


#: A device or a disk with less than this is a number without its unit.
_LEAST_MEMORY_BYTES = 64 * 1024**2


def memory_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """As :func:`byte_count`, for memory and bandwidth: refuses ``80``, which is 80 bytes, and names what was probably meant."""
    if value is None:
        return None
    nbytes = byte_count(context, parameter, value)
    if nbytes < _LEAST_MEMORY_BYTES and not value.strip()[-1].isalpha():
        raise click.BadParameter(
            f"{value} without a unit is {nbytes:,} bytes; did you mean {value.strip()}GiB?",
            context,
            parameter,
        )
    return nbytes


def check_axes(*, ranks: int, nodes: int, replicas: int, tp: int, ep: int) -> None:
    """Raise ``BadParameter`` for counts of ranks that can't be arranged so."""
    for name, value, of in (
        ("nodes", ranks >= nodes, f"{nodes} nodes are more than {ranks} ranks"),
        ("replicas", ranks % replicas == 0, f"{replicas} does not divide {ranks} ranks"),
        ("tp", ranks % (replicas * tp) == 0, f"{tp} does not divide the ranks of a replica"),
        ("ep", ranks % (replicas * ep) == 0, f"{ep} does not divide the ranks of a replica"),
        ("ep", ep == 1 or ep % tp == 0, f"{ep} is not a multiple of --tp {tp}"),
    ):
        if not value:
            raise click.BadParameter(of, param_hint=f"'--{name}'")


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json`` and ``--debug``. The program itself reads both, also when parsing fails."""
    option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
    return option(debug(command))


def debug(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--debug``, for the program and for each command: people write it before a command and after it."""
    return click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks.")(command)


def source_path(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument PATH, unchecked: the readers raise better errors."""
    return click.argument("path", type=AnyPath(path_type=str))(command)


def config(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--config``, for sources that have none of their own."""
    help = "Directory with config.json, tokenizer and custom code, if PATH has none."
    return click.option("--config", type=AnyPath(path_type=str), default=None, metavar="DIR", help=help)(
        command
    )


def one_model(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--model``, for commands that write one model of a checkpoint that may hold several."""
    help = "Model to use, if the checkpoint has several."
    return click.option("--model-name", default=None, metavar="NAME", help=help)(command)


def trust_remote_code(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--trust-remote-code``, for commands that build the model."""
    help = "Run the Python files that come with the model."
    return click.option("--trust-remote-code", is_flag=True, help=help)(command)


def as_load_pretrained(command: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of ``load_pretrained`` that choose the model and its source."""
    options = (
        click.option("--auto-class", default=None, metavar="[MODULE:]CLASS", help=_CLASS_HELP),
        click.option(
            "--key-mapping", nargs=2, multiple=True, metavar="REGEX TEXT", help="Rename stored tensors."
        ),
        click.option(
            "--allow-unused", multiple=True, metavar="PATTERN", help="Stored tensors that may stay unused."
        ),
        click.option(
            "--allow-missing", multiple=True, metavar="PATTERN", help="Tensors that may be missing from PATH."
        ),
        click.option("--adapter", default=None, metavar="DIR", help=_ADAPTER_HELP),
        click.option(
            "--quantized",
            type=click.Choice(("dequantize", "keep", "nf4", "fp4")),
            default="dequantize",
            show_default=True,
            help="Dequantize, keep the stored codes, or quantize plain weights to 4 bits.",
        ),
        click.option("--revision", default=None, help="Branch, tag or commit on the hub."),
        click.option(
            "--subfolder", default="", metavar="DIR", help="Folder in PATH that contains the model."
        ),
        click.option("--variant", default=None, help="Use model.VARIANT.safetensors."),
        click.option("--cache-dir", default=None, metavar="DIR", help="Hub cache. Default: HF_HUB_CACHE."),
    )
    for option in reversed(options):
        command = option(command)
    return command


_CLASS_HELP = "Model class or Auto class, from transformers or MODULE. Default: the class in the config."
_ADAPTER_HELP = "Adapter to load; if DIR has only adapter_config.json, a new one."


def model_class(name: str | None) -> Any:
    """The class that ``--auto-class`` names, of transformers or of a module. Raises ``BadParameter``."""
    if name is None:
        return None
    from ..internals.transformers import can_be_built

    module, _, kind = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module or "transformers"), kind, None)
    except ImportError as error:
        raise click.BadParameter(
            f"{module} can't be imported: {error}", param_hint="'--auto-class'"
        ) from error
    if not can_be_built(found):
        where = module or "transformers"
        raise click.BadParameter(f"{where} has no model class {kind!r}", param_hint="'--auto-class'")
    return found


def quantized_as(name: str) -> Any:
    """The value of ``quantized=`` for ``--quantized``."""
    if name in ("dequantize", "keep"):
        return name
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name)


def new_adapter(directory: str | None) -> Any:
    """The value of ``adapter=`` for ``--adapter``: the directory, or its config if it holds nothing else."""
    if directory is None or not os.path.isfile(os.path.join(directory, "adapter_config.json")):
        return directory
    if any(name.startswith("adapter_model.") for name in os.listdir(directory)):
        return directory
    from ..adapters.files import read_adapter_config

    return read_adapter_config(directory)
