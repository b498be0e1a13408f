"""A model's directory that only some ranks have, or that lies in a store: the ranks get its documents, which a model is built from."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import SourceError
from ..limits import inside
from ..ranks.ranks import Ranks
from ..storage import Stat, counted_here, files_in, folders_in, is_url, join, looking_once, read_range

__all__ = ["DOCUMENTS", "documents_of", "lend_documents"]

#: Config, tokenizer, processor and chat template files; small, as against weights.
DOCUMENTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe")
_MAX_BYTES = 256 * 1024**2
#: Documents of a store that are read at a time.
_AT_ONCE = 8


def lend_documents(directory: str, lender: int, ranks: Ranks, *, with_code: bool) -> str:
    """The directory on ranks that have it; on the others a temporary copy of its documents, until the process ends. A
    directory may be a URL, which ``lender`` reads.

    Every rank must call it. ``with_code``: Python files, too. Raises :class:`SourceError` or :class:`RankError`.
    """
    ends = (*DOCUMENTS, ".py") if with_code else DOCUMENTS

    def read() -> dict[str, bytes]:
        if ranks.rank != lender:
            return {}
        return _in_store(directory, ends) if is_url(directory) else _documents(Path(directory), ends)

    documents: dict[str, bytes] = ranks.combine("lend the model's documents", read, lambda all_: all_[lender])
    with ranks.agree("write the model's documents"):
        if os.path.lexists(directory):
            return directory
        return _written(documents)


def documents_of(url: str, *, with_code: bool) -> str:
    """A temporary directory with the documents at a URL, until the process ends. Rank-local. Raises :class:`SourceError`."""
    return _written(_in_store(url, (*DOCUMENTS, ".py") if with_code else DOCUMENTS))


def _written(documents: Mapping[str, bytes]) -> str:
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
    _refuse_large(sum(path.stat().st_size for path in files), str(directory))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def _in_store(url: str, ends: tuple[str, ...]) -> dict[str, bytes]:
    """The same of a URL, without indexes of weights: who reads the weights reads these."""
    with looking_once(url):
        found = dict(_documents_below(url, "", ends))
        for folder in sorted(folders_in(url)):
            found |= _documents_below(join(url, folder), f"{folder}/", ends)
    _refuse_large(sum(stat.nbytes for stat in found.values()), url)

    def read(name: str) -> bytes:
        return read_range(join(url, name), 0, found[name].nbytes, version=found[name].version)

    with ThreadPoolExecutor(_AT_ONCE, "shardwise-documents") as pool:
        return dict(zip(found, pool.map(counted_here(read), found), strict=True))


def _documents_below(url: str, prefix: str, ends: tuple[str, ...]) -> dict[str, Stat]:
    files = files_in(url)
    return {
        prefix + name: files[name] for name in sorted(files) if name.endswith(ends) and ".index." not in name
    }


def _refuse_large(nbytes: int, where: str) -> None:
    if nbytes > _MAX_BYTES:
        raise SourceError(
            f"its documents are {nbytes} bytes, of which at most {_MAX_BYTES} are sent to ranks that do not have the directory; "
            f"copy it to every host",
            path=where,
        )
