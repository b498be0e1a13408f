"""The report of a load: counts, bytes, seconds, and everything that was skipped, with its declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..models.host_budget import HostBudget
from ..objects import frozen
from ..operations.printed import Printed
from ..planning import Plan
from ..planning.casts import Cast, casts_of
from ..quantized.dequantized import Dequantized, described
from ..recipe.host_convert import Converted
from ..recipe.match import Declaration
from ..storage import Requests

__all__ = ["LoadReport", "ReadCost", "load_report", "noted"]

#: The last report of each model that a load has filled.
_reports: WeakKeyDictionary[nn.Module, LoadReport] = WeakKeyDictionary()


@frozen(kw_only=True)
class ReadCost:
    """The cost of carrying out a plan on this rank; for the fields see :class:`LoadReport`."""

    bytes_read: int
    requests: int
    bytes_sent: int
    staging_peak_bytes: int
    page_cache: str
    pages: str
    reads: str
    strategy: str


@frozen
class LoadReport(Printed):
    """The result of a load on this rank."""

    source: str
    tensors: int
    """Number of the model's tensors that were filled from the source."""
    model_bytes: int
    """Bytes of the complete model, counting tied tensors once."""
    local_bytes: int
    """Bytes of this rank's shards."""
    bytes_read: int
    """Bytes that this rank requested from storage."""
    requests: int
    """Requests that this rank made to object stores, including rank 0's requests to inspect the source. 0 for local files."""
    staging_peak_bytes: int
    """Peak host memory in addition to the destination."""
    seconds_plan: float
    seconds_read: float
    unused: tuple[Declaration, ...]
    """Stored tensors that were skipped, and who declared that they may be."""
    initialized: tuple[Declaration, ...]
    """Tensors that were initialized by the model's own rule, and who declared that they may be."""
    converted: tuple[Converted, ...]
    """Conversions that couldn't be compiled to byte ranges. Each rank that needs a part of a result ran them in full."""
    dequantized: tuple[Dequantized, ...]
    """Quantized formats in the source whose tensors were dequantized."""
    ignored_files: tuple[str, ...]
    verified: str
    """How the load was checked: "digest" if every tensor's content was compared, otherwise "cover"."""
    digests_compared: int
    """Number of tensors whose digest was compared with the recorded one."""
    page_cache: str
    """Whether the files stayed in the kernel's page cache: "keep" or "release". See ``IOOptions.page_cache``."""
    pages: str
    """Page size of the memory that was allocated on the CPU, and why. See ``IOOptions.pages``."""
    reads: str
    """How this rank read files, and why: "plain: …" or "ahead …: …". See ``IOOptions.reads``."""
    strategy: str
    """Who read the source, and why: "own: …", "node: …" or "once: …". See ``IOOptions.strategy``."""
    bytes_sent: int
    """Bytes of the source that this rank sent to other ranks, if each range is read by one rank ("once")."""
    casts: tuple[Cast, ...]
    """Casts that round stored values (fp32 to bf16, bf16 to fp16), whether or not you asked for the dtype. For dequantized tensors, the
    dtype before the cast is that of the dequantized values."""
    host: HostBudget | None
    """Memory limit and free memory of this rank's host before the load. None if the system doesn't report them."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        cost: ReadCost,
        *,
        source: str,
        seconds_plan: float,
        seconds_read: float,
        digests_compared: int,
        host: HostBudget | None,
        is_kept: Callable[[str], bool],
    ) -> LoadReport:
        """Create the report of a load that ran ``plan``. ``is_kept``: whether the model's class keeps a tensor in fp32. The other arguments are
        fields.
        """
        return cls(
            source=source,
            tensors=len(plan.recipes),
            model_bytes=sum(w.nbytes for w in plan.wanted),
            local_bytes=plan.local_nbytes,
            bytes_read=cost.bytes_read,
            requests=cost.requests,
            staging_peak_bytes=cost.staging_peak_bytes,
            seconds_plan=seconds_plan,
            seconds_read=seconds_read,
            unused=plan.unused,
            initialized=plan.initialized,
            converted=tuple(host.describe() for host in dict.fromkeys(plan.conversions.values())),
            dequantized=described(plan.coded.values(), plan.kept),
            ignored_files=plan.ignored_files,
            verified="digest" if digests_compared and digests_compared == len(plan.recipes) else "cover",
            digests_compared=digests_compared,
            page_cache=cost.page_cache,
            pages=cost.pages,
            reads=cost.reads,
            strategy=cost.strategy,
            bytes_sent=cost.bytes_sent,
            casts=casts_of(plan.rounded, is_kept),
            host=host,
        )

    def after(self, looks: Requests) -> LoadReport:
        """A copy of the report that includes the requests made before planning."""
        return replace(self, requests=self.requests + looks.total)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def noted(model: nn.Module, report: LoadReport) -> LoadReport:
    """``report``, after it was noted as the model's last one."""
    _reports[model] = report
    return report


def load_report(model: nn.Module) -> LoadReport:
    """Return the report of the last load into ``model`` in this process.

    Also works for a model that was wrapped after the load: compiled, in DDP, or in a ``PeftModel``. Takes no memory beyond
    the report and no communication; a single rank may call it. Raises :class:`ValueError` for a model that neither :func:`load` nor
    ``load_pretrained`` filled.
    """
    for module in model.modules():
        if (report := _reports.get(module)) is not None:
            return report
    raise ValueError(
        f"load_report: this {type(model).__name__} was not filled by sw.load or load_pretrained in this process; a copy of a model "
        "(copy.deepcopy, sw.clone) has no report, so pass the one that was loaded"
    )
