"""A model's directory that only some ranks have: the other ranks get its documents, which a model is built from."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from ..errors import SourceError
from ..limits import inside
from ..ranks.ranks import Ranks

__all__ = ["DOCUMENTS", "lend_documents"]

#: Config, tokenizer, processor and chat template files; small, as against weights.
DOCUMENTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe")
_MAX_BYTES = 256 * 1024**2


def lend_documents(directory: str, lender: int, ranks: Ranks, *, with_code: bool) -> str:
    """The directory on ranks that have it; on the others a temporary copy of its documents, until the process ends.

    Every rank must call it. ``with_code``: Python files, too. Raises :class:`SourceError` or :class:`RankError`.
    """
    ends = (*DOCUMENTS, ".py") if with_code else DOCUMENTS

    def read() -> dict[str, bytes]:
        return _documents(Path(directory), ends) if ranks.rank == lender else {}

    documents: dict[str, bytes] = ranks.combine("lend the model's documents", read, lambda all_: all_[lender])
    with ranks.agree("write the model's documents"):
        if os.path.lexists(directory):
            return directory
        copy = tempfile.mkdtemp(prefix="shardwise-")
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        for name, content in documents.items():
            file = Path(inside(copy, name))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return copy


def _documents(directory: Path, ends: tuple[str, ...]) -> dict[str, bytes]:
    """Documents of a directory and of those right in it, by relative name."""
    found = [p for pattern in ("*", "*/*") for p in sorted(directory.glob(pattern)) if p.name.endswith(ends)]
    files = [path for path in found if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    if nbytes > _MAX_BYTES:
        raise SourceError(
            f"only some ranks have this directory, and its documents are {nbytes} bytes, of which at most {_MAX_BYTES} are "
            f"sent; copy the directory to every host",
            path=str(directory),
        )
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}
