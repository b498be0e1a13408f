"""Optimizer states of few bits (torchao's) as plain tensors, and what rounding does to an update."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..dtypes import code_of, torch_dtype
from ..errors import FormatError, StateError
from ..internals.low_bit import KINDS, LowBit, fresh_book, low_bit, low_bit_state
from ..internals.torch import dtensor_like, local_tensor
from ..limits import MAX_COUNT, brief, cause
from ..objects import frozen
from ..tensors.live import HostMemory
from ..tensors.placements import BlockGrid, grid_of

# ----------------------------------------------------------------------------------------------------
# Optimizer states of few bits (torchao's): as plain tensors that are spread like their parameter, and made of such again.
#
# A state ``exp_avg`` is stored as ``exp_avg:codes`` and ``exp_avg:scale``, and a document says what they are. Both are tensors
# of the whole parameter (:mod:`..layout.blocks`): plans, digests and resharding treat them like any other state.

#: The stored tensors of one state.
PARTS = ("codes", "scale")
#: The part of a state that a rank holds in full, where others hold it in few bits.
PLAIN = "plain"


@frozen
class Form:
    """What the codes and scales of a state stand for; equal on every rank that holds elements of it."""

    kind: str
    block: int
    """Elements with one scale."""
    signed: bool | None
    dtype: str
    """What the state says that it is: a stored dtype."""
    scale: str
    """The stored dtype of its scales."""

    @property
    def book(self) -> str:
        """The key of its code book; empty if it needs none."""
        return f"{self.kind}.{'signed' if self.signed else 'unsigned'}" if KINDS[self.kind].book else ""

    @property
    def book_length(self) -> int:
        """How many numbers codes may stand for; 0 without a code book."""
        return KINDS[self.kind].book

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.kind} in blocks of {self.block}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Any, where: str) -> Form:
        """The form that plain values say. Raises :class:`FormatError` if they say none."""
        expected = [f.name for f in fields(cls)]
        if not isinstance(value, dict) or value.keys() != set(expected):
            raise FormatError(f"{where}: expected {', '.join(expected)}, got {brief(value)}")
        found = cls(**value)
        if not isinstance(found.kind, str) or found.kind not in KINDS:
            raise FormatError(
                f"{where}: a kind {brief(found.kind)} of states, this release knows {', '.join(KINDS)}"
            )
        if type(found.block) is not int or not 0 < found.block <= MAX_COUNT:
            raise FormatError(f"{where}: blocks of {brief(found.block)} elements")
        if not isinstance(found.signed, bool if KINDS[found.kind].book else type(None)):
            raise FormatError(f"{where}: signed is {brief(found.signed)}")
        for code in (found.dtype, found.scale):
            if not isinstance(code, str) or not torch_dtype(code).is_floating_point:
                raise FormatError(f"{where}: the dtype {brief(code)} is not one of numbers with a point")
        return found

    def grid(self, shape: Sequence[int]) -> BlockGrid | None:
        """The blocks in a parameter of global ``shape``; None if its elements can't be stored block by block."""
        found = grid_of(shape, self.block)
        return None if found is None or found.unit % KINDS[self.kind].elements else found

    def elements(self, part: str) -> int:
        """How many elements one number of a part stands for."""
        return self.block if part == "scale" else KINDS[self.kind].elements

    def dtype_of(self, part: str) -> str:
        """The stored dtype of a part."""
        return self.scale if part == "scale" else code_of(KINDS[self.kind].codes)


@frozen
class StoredForm:
    """A stored state of few bits."""

    form: Form
    grid: BlockGrid
    """Its blocks in the whole parameter."""
    book: torch.Tensor | None


def part_name(state: str, part: str) -> str:
    """The name under which a part of a state is stored."""
    return f"{state}:{part}"


def form_of(value: torch.Tensor) -> Form | None:
    """The form of a state of few bits on this rank, None of any other tensor.

    On a rank without elements of the parameter, torchao keeps a plain, empty tensor.
    """
    found = low_bit(local_tensor(value))
    if found is None:
        return None
    return Form(found.kind, found.block, found.signed, code_of(found.dtype), code_of(found.scale.dtype))


def contents_of(local: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors in a local tensor; itself, if it is one."""
    found = low_bit(local)
    return [local] if found is None else [t for t in (found.codes, found.scale, found.book) if t is not None]


def parts_of(
    value: torch.Tensor, parameter: torch.Tensor, form: Form, grid: BlockGrid
) -> dict[str, torch.Tensor]:
    """The stored tensors of a state by part, spread over ranks like its parameter. References, no copies."""
    found = low_bit(local_tensor(value))
    local, made = local_tensor(parameter), {}
    for part in PARTS:
        elements = form.elements(part)
        if found is None:  # no elements
            content = local.new_empty((0,), dtype=torch_dtype(form.dtype_of(part)))
        else:
            content = found.scale if part == "scale" else found.codes
        shape = grid.part_shape(elements, local.shape)
        made[part] = dtensor_like(parameter, content.view(shape), grid.part_shape(elements))
    return made


def parts_by_rank(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """This rank's own tensors of a state by part, as they are. References, no copies."""
    local = local_tensor(value)
    found = low_bit(local)
    return {PLAIN: local} if found is None else {"codes": found.codes, "scale": found.scale}


def state_by_rank(
    held: Mapping[str, torch.Tensor | None], parameter: torch.Tensor, form: Form, book: torch.Tensor | None
) -> torch.Tensor:
    """A state of what :func:`parts_by_rank` gave, on the device of its parameter. Raises ``ValueError`` if they do not fit."""
    local = local_tensor(parameter.detach())
    plain, codes, scale = (
        None if t is None else t.to(local.device) for t in (held[PLAIN], *map(held.get, PARTS))
    )
    if plain is not None:
        if plain.shape != local.shape:
            raise ValueError(f"shape {list(plain.shape)}, expected {list(local.shape)}")
        return dtensor_like(parameter, plain, parameter.shape)
    if codes is None or scale is None:
        raise ValueError("expected codes and scales")
    count = local.numel()
    if (codes.numel() * form.elements("codes"), scale.numel() * form.block) != (count, count):
        raise ValueError(
            f"{codes.numel()} codes and {scale.numel()} scales, expected those of {count} elements"
        )
    for part, tensor in zip(PARTS, (codes, scale), strict=True):
        if code_of(tensor.dtype) != form.dtype_of(part):
            raise ValueError(f"{part} of {code_of(tensor.dtype)}, expected {form.dtype_of(part)}")
    return dtensor_like(parameter, _made(codes, scale, book, form, local), parameter.shape)


def books_of(states: Mapping[str, tuple[torch.Tensor, Form]]) -> dict[str, torch.Tensor]:
    """The code book of each kind among states, by :attr:`Form.book`, on the CPU.

    Raises :class:`StateError` naming a state with another book than the rest.
    """
    held: dict[str, dict[str, torch.Tensor]] = {}
    empty: dict[str, Form] = {}
    for name, (value, form) in states.items():
        found = low_bit(local_tensor(value))
        if not form.book:
            continue
        if found is None or found.book is None:
            empty[form.book] = form
        else:
            held.setdefault(form.book, {})[name] = found.book
    books = {}
    for key, by_name in held.items():
        each = torch.stack(list(by_name.values())).cpu()
        if other := [n for n, book in zip(by_name, each, strict=True) if not torch.equal(book, each[0])]:
            raise StateError(
                f"optimizer state {other[0]} has another code book than {next(iter(by_name))}, and both are {key}; a "
                f"checkpoint holds one of each kind. Make the states by one version of torchao"
            )
        books[key] = each[0].clone()
    for key, form in empty.items():
        if key not in books:
            books[key] = fresh_book(form.kind, bool(form.signed))
    return books


def room_for(
    old: torch.Tensor | None,
    parameter: torch.Tensor,
    stored: StoredForm,
    memory: HostMemory,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A state of that form, and its stored tensors to be filled: ``old`` if it is of that form, else a new one from ``memory``.

    The caller makes sure that ``old`` is spread like the parameter, and that the parameter's cuts lie between blocks. Raises
    :class:`StateError` where torchao is not installed, or is another one.
    """
    local, form, book = local_tensor(parameter.detach()), stored.form, stored.book
    if old is None or (form_of(old) != form and local.numel()):
        old = dtensor_like(parameter, _new_local(local, form, book, memory), parameter.shape)
    elif book is not None and (held := low_bit(local_tensor(old))) is not None and held.book is not None:
        held.book.copy_(book)
    return old, parts_of(old, parameter, form, stored.grid)


def _new_local(
    local: torch.Tensor, form: Form, book: torch.Tensor | None, memory: HostMemory
) -> torch.Tensor:
    if not local.numel():
        return torch.zeros_like(local)

    def empty(part: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = torch_dtype(form.dtype_of(part))
        if local.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=local.device)
        return memory.empty(shape, torch.empty(shape, device="meta").stride(), dtype)

    per_code = form.elements("codes")
    codes = empty("codes", tuple(local.shape) if per_code == 1 else (local.numel() // per_code,))
    scale = empty("scale", (local.numel() // form.block,))
    return _made(codes, scale, book, form, local)


def _made(
    codes: torch.Tensor, scale: torch.Tensor, book: torch.Tensor | None, form: Form, local: torch.Tensor
) -> torch.Tensor:
    own = None if book is None else book.to(local.device, copy=True)
    made = LowBit(form.kind, codes, scale, own, form.signed, form.block, torch_dtype(form.dtype))
    try:
        return low_bit_state(made, tuple(local.shape))
    except (ImportError, AttributeError, TypeError) as error:
        raise StateError(
            f"the checkpoint holds optimizer states of torchao's {form.kind}, and torchao can't make them here "
            f"({cause(error)}); install the torchao of the saved run"
        ) from error


# ----------------------------------------------------------------------------------------------------
# Weights in 16 bits under an optimizer that adds small steps to them: most steps are rounded away.

_log = logging.getLogger(__name__)
#: Of the optimizers that were warned about, in this process: one warning is enough.
_warned = False


def warn_of_rounded_updates(optimizers: Mapping[str, Optimizer]) -> None:
    """Log once, on rank 0, if one of torch's own optimizers trains weights of 16 bits.

    Those of other packages are left alone: some keep fp32 masters, or round stochastically.
    """
    global _warned
    if _warned:
        return
    for optimizer in optimizers.values():
        if not type(optimizer).__module__.startswith("torch.optim"):
            continue
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        half = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
        if not half:
            continue
        _warned = True
        if not (dist.is_initialized() and dist.get_rank()):
            _log.warning(
                "%s trains %d of %d tensors in %s: an update below 1/256 of a bf16 weight is rounded away. Load fp32 weights and "
                "compute in bf16: sw.load_pretrained(path, mesh, dtype=torch.float32, policy=sw.ShardPolicy("
                "mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))",
                type(optimizer).__name__,
                len(half),
                len(parameters),
                str(half[0].dtype).removeprefix("torch."),
            )
        return
