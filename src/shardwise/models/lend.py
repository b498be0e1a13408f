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
from ..limits import inside, leads_out, read_small
from ..ranks.ranks import Ranks
from ..storage import (
    Stat,
    counted_here,
    files_below,
    files_in,
    folders_in,
    is_url,
    join,
    looking_once,
    read_range,
)
from .documents import (
    ALPHABET,
    LANGUAGE_MODEL,
    MODULES_NAME,
    files_below_modules,
    is_document,
    modules_in,
    named_in,
)

__all__ = ["documents_of", "lend_documents"]

_MAX_BYTES = 256 * 1024**2
#: Documents of a store that are read at a time.
_AT_ONCE = 8


def lend_documents(directory: str, lender: int, ranks: Ranks, *, with_code: bool) -> str:
    """The directory on ranks that have it; on the others a temporary copy of its documents, until the process ends. A
    directory may be a URL, which ``lender`` reads.

    Every rank must call it. ``with_code``: Python files, too. Raises :class:`SourceError` or :class:`RankError`.
    """

    def read() -> dict[str, bytes]:
        if ranks.rank != lender:
            return {}
        return _in_store(directory, with_code) if is_url(directory) else _documents(directory, with_code)

    documents: dict[str, bytes] = ranks.combine("lend the model's documents", read, lambda all_: all_[lender])
    with ranks.agree("write the model's documents"):
        if os.path.lexists(directory):
            return directory
        return _written(documents)


def documents_of(url: str, *, with_code: bool) -> str:
    """A temporary directory with the documents at a URL, until the process ends. Rank-local. Raises :class:`SourceError`."""
    return _written(_in_store(url, with_code))


def _written(documents: Mapping[str, bytes]) -> str:
    copy = tempfile.mkdtemp(prefix="shardwise-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for name, content in documents.items():
        file = Path(inside(copy, name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return copy


def _is_lent(name: str, with_code: bool) -> bool:
    """Whether a rank without the directory needs a file: a document, what a checkpoint or an adapter says of itself, or code."""
    return (
        is_document(name)
        or (name.endswith(".json") and ".index." not in name)
        or (with_code and name.endswith(".py"))
    )


def _documents(directory: str, with_code: bool) -> dict[str, bytes]:
    """Documents of a directory and of those right in it, by relative name. Links out of it are not among them."""
    root = Path(directory)
    found = [p for pattern in ("*", "*/*") for p in sorted(root.glob(pattern)) if _is_lent(p.name, with_code)]
    files = {str(p.relative_to(root)): p for p in found if p.is_file() and not leads_out(directory, str(p))}
    if (modules := files.get(MODULES_NAME)) is not None:
        below = [root / name for name in files_below_modules(directory, modules_in(read_small(str(modules))))]
        files |= {
            str(p.relative_to(root)): p for p in below if p.is_file() and not leads_out(directory, str(p))
        }
    further = named_in(directory, [p.name for p in sorted(root.iterdir()) if p.is_dir()])
    if ALPHABET in files:
        further += files_below_modules(directory, [LANGUAGE_MODEL])
    for path in (root / name for name in further):
        if path.is_file() and not leads_out(directory, str(path)):
            files[str(path.relative_to(root))] = path
    _refuse_large(sum(path.stat().st_size for path in files.values()), directory)
    return {name: path.read_bytes() for name, path in files.items()}


def _in_store(url: str, with_code: bool) -> dict[str, bytes]:
    """The same of a URL."""
    with looking_once(url):
        found = dict(_documents_below(url, "", with_code))
        for folder in sorted(folders_in(url)):
            found |= _documents_below(join(url, folder), f"{folder}/", with_code)
        if MODULES_NAME in found:
            for module in modules_in(read_small(join(url, MODULES_NAME))):
                found |= {
                    f"{module}/{name}": stat for name, stat in files_below(join(url, module)).items() if stat
                }
    _refuse_large(sum(stat.nbytes for stat in found.values()), url)

    def read(name: str) -> bytes:
        return read_range(join(url, name), 0, found[name].nbytes, version=found[name].version)

    with ThreadPoolExecutor(_AT_ONCE, "shardwise-documents") as pool:
        return dict(zip(found, pool.map(counted_here(read), found), strict=True))


def _documents_below(url: str, prefix: str, with_code: bool) -> dict[str, Stat]:
    files = files_in(url)
    return {prefix + name: files[name] for name in sorted(files) if _is_lent(name, with_code)}


def _refuse_large(nbytes: int, where: str) -> None:
    if nbytes > _MAX_BYTES:
        raise SourceError(
            f"its documents are {nbytes} bytes, and at most {_MAX_BYTES} are sent to ranks that do not have the directory; "
            f"copy it to every host",
            path=where,
        )
