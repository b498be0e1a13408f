"""Locates a model's files: a local directory or a snapshot of a hub repository; and what a caller may ask of the model."""

from __future__ import annotations

import atexit
import glob
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch

from ..catalog.records import PIPELINE_NAME, kind_in
from ..catalog.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Choice,
    chosen,
    config_in,
)
from ..errors import SourceError
from ..limits import inside, leads_out, read_json, read_small
from ..names import patterns_of
from ..objects import frozen
from ..ranks.ranks import Ranks
from ..storage import files_below, files_in, folders_in, looking_once, read_range
from ..storage.records import Stat, counted_here, is_url, join, place_of
from .build import refuse_request
from .classes import outline, outline_of_cache, same_directory
from .documents import (
    ALPHABET,
    LANGUAGE_MODEL,
    MODULES_NAME,
    documents_among,
    files_below_modules,
    is_document,
    modules_in,
    named_in,
)

# ----------------------------------------------------------------------------------------------------
# A model's directory that only some ranks have, or that lies in a store: the ranks get its documents, which a model is built from.

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


# ----------------------------------------------------------------------------------------------------
# Locates a model's files: a local directory, or a snapshot of a Hugging Face hub repository in the local cache.
#
# One rank per cache downloads, and the ranks that share the cache wait as long as it works. It downloads only the files
# that a load needs; a plan needs no weights (:mod:`.classes`).

_log = logging.getLogger(__name__)
T = TypeVar("T")

#: ``name`` or ``organization/name``; huggingface_hub checks the rest.
_HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUMBERED = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})(?P<end>\..*)")
_TICK_S = 0.2
_ANY = Choice()
#: A path that does not exist here, and that is no id of a hub.
_ABSENT = False


@frozen(kw_only=True)
class HubOptions:
    """Options for files of a hub repository, as in ``from_pretrained``."""

    revision: str | None = None
    """Branch, tag or commit. Default: the main branch."""
    token: str | bool | None = field(default=None, repr=False)
    """Default: the token of ``hf auth login`` or ``HF_TOKEN``. Never stored or logged."""
    cache_dir: str | os.PathLike[str] | None = None
    """Default: huggingface_hub's (``HF_HUB_CACHE``, ``HF_HOME``)."""
    subfolder: str = ""
    """Subfolder of the repository or of the local directory."""
    variant: str | None = None
    """``"fp16"`` takes ``model.fp16.safetensors``, also from a local directory."""
    use_safetensors: bool | None = None
    """True: safetensors only. False: ``pytorch_model.bin`` only. None: safetensors first."""
    local_files_only: bool = False
    """Use only the cache, as ``HF_HUB_OFFLINE=1`` does."""
    force_download: bool = False
    config: Any = field(default=None, repr=False)
    """The config object that the caller gave instead of the stored one: it may name the file of the weights."""
    outlines: Callable[[], str] | None = None
    """Makes a directory for outlines of models that the cache lacks: of their weights only the headers are fetched."""

    @property
    def choice(self) -> Choice:
        """Which of several models in the directory is meant."""
        return Choice(variant=self.variant, use_safetensors=self.use_safetensors, config=self.config)


def is_hub_id(path: str) -> bool:
    """Whether a text that is not a local path can be the id of a hub repository. Looks only at the text."""
    return _HUB_ID.fullmatch(path) is not None and "--" not in path and ".." not in path


def find_model(
    source: str | os.PathLike[str], options: HubOptions, ranks: Ranks, *, with_code: bool = False
) -> str:
    """The local directory of a model: ``source`` itself if it exists, otherwise the cached snapshot of a Hub ID.

    One rank per cache downloads missing files: config, tokenizer and processor files, the weights of
    ``options.variant``, and with ``with_code`` the Python files. A path that neither exists nor can be an id is
    returned unchanged; its reader refuses it.

    Every rank must call it; at most three agreements. All ranks get the same commit. Raises :class:`SourceError`, or
    :class:`RankError` alike on every rank: no such model, no access, not in the cache while offline, a download that
    failed.
    """
    return find_for_all(source, options, ranks, with_code=with_code).directory


@frozen
class Found:
    """A model's directory on this rank."""

    directory: str
    lent: str | None = None
    """The path that only some ranks have, or a URL; ``directory`` is then a copy of its documents on the other ranks."""


def find_for_all(
    source: str | os.PathLike[str],
    options: HubOptions,
    ranks: Ranks,
    *,
    with_code: bool = False,
    download: Callable[[HubOptions], str] | None = None,
) -> Found:
    """:func:`find_model`; a rank on which a path does not exist gets the documents of one that has it.

    ``download`` replaces what a model's loader needs: it returns the folder of a snapshot, of the cache alone where the options say
    ``local_files_only``.
    """
    path = os.fspath(source)
    if is_url(path):
        url = inside(place_of(path).url, *filter(None, [options.subfolder.strip("/")]))
        return Found(lend_documents(url, 0, ranks, with_code=with_code), lent=url)

    def look() -> str | bool | None:
        if os.path.lexists(path):
            return None
        return _identity(_cache_dir(options)) if is_hub_id(path) else _ABSENT

    caches = ranks.combine("find the model", look, lambda caches: _downloaders(path, caches))
    downloaders, lender = caches["downloaders"], caches["lender"]
    if not downloaders:
        directory = inside(path, *filter(None, [options.subfolder.strip("/")]))
        if lender is None:
            return Found(directory)
        return Found(lend_documents(directory, lender, ranks, with_code=with_code), lent=directory)
    folder = ""

    def fetch() -> str:
        nonlocal folder
        if ranks.rank in downloaders:
            folder = _while_ticking(
                lambda: (
                    _fetch(path, options, with_code)
                    if download is None
                    else _fetched_by(download, path, options)
                ),
                ranks.tick,
            )
        return os.path.basename(folder)

    commit = ranks.combine(f"get {path} from the Hub", fetch, lambda found: _one_commit(path, found))
    with ranks.agree(f"find {path} in the cache"):
        if not folder and download is not None:
            known = replace(options, revision=commit, local_files_only=True, force_download=False)
            folder = _fetched_by(download, path, known)
        folder = folder or _cached(path, commit, options)
    return Found(inside(folder, *filter(None, [options.subfolder.strip("/")])))


def _downloaders(path: str, caches: list[str | bool | None]) -> dict[str, Any]:
    """The first rank of each cache, or no rank; and the first rank that has the path, if only some have it."""
    if _ABSENT in caches:
        return {"downloaders": [], "lender": caches.index(None) if None in caches else None}
    local = [rank for rank, cache in enumerate(caches) if cache is None]
    if local and len(local) < len(caches):
        raise SourceError(
            f"exists on {len(local)} ranks (the first is rank {local[0]}) and not on the other {len(caches) - len(local)}; "
            "expected a path that every host has, or a Hub ID that isn't a path on any of them",
            path=path,
        )
    return {"downloaders": [] if local else sorted({caches.index(c) for c in caches}), "lender": None}


def _one_commit(path: str, commits: list[str]) -> str:
    found = sorted(set(commits) - {""})
    if len(found) > 1:
        raise SourceError(
            f"hosts have different commits of it ({', '.join(found)}); give revision=<one of them>",
            path=path,
        )
    return found[0]


def _while_ticking(work: Callable[[], T], tick: Callable[[], None]) -> T:
    """Run ``work`` in another thread, and tell the other ranks meanwhile that this rank makes progress.

    huggingface_hub ends each stalled request; a limit for the whole download is not possible.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="shardwise-download")
    thread.start()
    while thread.is_alive():
        tick()
        thread.join(_TICK_S)
    if errors:
        raise errors[0]
    return results[0]


# ----------------------------------------------------------------------------------------------------
# One rank, one cache


def _cache_dir(options: HubOptions) -> str:
    from huggingface_hub import constants

    return os.path.abspath(os.path.expanduser(options.cache_dir or constants.HF_HUB_CACHE))


def _identity(cache: str) -> str:
    try:
        return same_directory(cache)
    except OSError:  # the cache can't be made: nothing can be downloaded into it
        return f"{socket.gethostname()}/{cache}"


def _fetch(model: str, options: HubOptions, with_code: bool) -> str:
    """The snapshot folder of a hub model, complete: from the cache if that is up to date, else downloaded."""
    from huggingface_hub import HfApi, constants, errors

    is_offline = options.local_files_only or constants.HF_HUB_OFFLINE
    is_fixed = options.revision is not None and _COMMIT.fullmatch(options.revision) is not None
    if is_offline or (is_fixed and not with_code and not options.force_download):
        try:
            return (
                _cached_or_outline(model, options)
                if is_offline
                else _cached(model, options.revision, options)
            )
        except SourceError:
            if is_offline:
                raise
    try:
        info = HfApi(token=options.token, library_name="shardwise").model_info(
            model, revision=options.revision
        )
        return _downloaded(
            model, str(info.sha), [s.rfilename for s in info.siblings or ()], options, with_code
        )
    except (SourceError, MemoryError):
        raise
    except Exception as error:  # from huggingface_hub, its HTTP library or the disk
        # Not chained: errors of the HTTP library hold the request, and the request holds the token.
        refusal = _explained(error, model, options)
        is_refused = isinstance(error, errors.RepositoryNotFoundError | errors.RevisionNotFoundError)
    if is_refused or options.force_download:
        raise refusal
    try:
        found = _cached_or_outline(model, options)
    except SourceError:
        raise refusal from None
    _log.warning("%s; using the cached files: %s", refusal, found)
    return found


def _fetched_by(download: Callable[[HubOptions], str], model: str, options: HubOptions) -> str:
    """The snapshot folder that another library's ``download`` gives. Its errors become those of :func:`_fetch`."""
    from huggingface_hub import constants

    if options.local_files_only or constants.HF_HUB_OFFLINE:
        _snapshot(model, options.revision, options)  # says that there is none
    try:
        return download(options)
    except (SourceError, MemoryError):
        raise
    except Exception as error:  # as in _fetch, not chained
        refusal = _explained(error, model, options)
    raise refusal


def _downloaded(model: str, commit: str, files: Collection[str], options: HubOptions, with_code: bool) -> str:
    """The snapshot folder of this commit, with every file that a load needs."""
    from huggingface_hub import hf_hub_download, snapshot_download

    common: dict[str, Any] = {
        "token": options.token,
        "cache_dir": _cache_dir(options),
        "library_name": "shardwise",
        "force_download": options.force_download,
    }
    inner = options.subfolder.strip("/")
    config, listed = (inside("", *filter(None, [inner, name])) for name in ("config.json", MODULES_NAME))
    at = ""
    if config in files and options.config is None:
        at = os.path.dirname(hf_hub_download(model, config, revision=commit, **common))
    modules: list[str] = []
    if listed in files:
        modules = modules_in(read_small(hf_hub_download(model, listed, revision=commit, **common)))
    try:
        names, index = needed_files(
            files,
            subfolder=options.subfolder,
            choice=_choice(at, options),
            with_code=with_code,
            modules=modules,
            where=model,
        )
    except SourceError:
        if options.outlines is None or not at:
            raise
        code = [n for n in files if with_code and n.endswith(".py")]
        return outline(options.outlines(), model, options.revision, commit, [config, *code], common)
    if index is not None:
        found = hf_hub_download(model, index, revision=commit, **common)
        names += _listed_weights(found, options.subfolder.strip("/"))
    if not options.force_download:
        try:
            folder = _snapshot(model, commit, options)
            names += _named_by_documents(folder, inner, files)
            if all(os.path.isfile(os.path.join(folder, name)) for name in names):
                return folder
        except SourceError:
            pass  # the cache lacks this commit: download it
    if options.outlines is not None:
        return outline(options.outlines(), model, options.revision, commit, names, common)
    _log.info("downloading %d files of %s at %s", len(names), model, commit)
    patterns = [glob.escape(name) for name in names]
    folder = str(snapshot_download(model, revision=options.revision, allow_patterns=patterns, **common))
    if os.path.basename(folder) != commit:
        raise SourceError(
            f"{options.revision or 'the main branch'} moved while it was downloaded; run again", path=model
        )
    more = _named_by_documents(folder, inner, files)
    if more := [name for name in more if not os.path.isfile(os.path.join(folder, name))]:
        snapshot_download(model, revision=commit, allow_patterns=[glob.escape(n) for n in more], **common)
    return folder


def _named_by_documents(folder: str, inner: str, files: Collection[str]) -> list[str]:
    """The files of a repository that documents of its snapshot name, such as a processor's arrays."""
    prefix = f"{inner}/" if inner else ""
    here = {name.removeprefix(prefix) for name in files if name.startswith(prefix)}
    folders = {name.partition("/")[0] for name in here if "/" in name}
    at = os.path.join(folder, inner) if inner else folder
    return [prefix + name for name in named_in(at, folders) if name in here] if os.path.isdir(at) else []


def _snapshot(model: str, revision: str | None, options: HubOptions) -> str:
    """The folder of a snapshot in the cache, maybe with few of its files. Raises :class:`SourceError`."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(
            model, revision=revision, cache_dir=_cache_dir(options), local_files_only=True
        )
    except LocalEntryNotFoundError as error:
        # Since huggingface_hub 2 an incomplete snapshot is an error; a load needs only some of its files.
        if folder := getattr(error, "snapshot_path", None):
            return str(folder)
        at = f" at revision {revision!r}" if revision else ""
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "only the cache was asked"
        raise SourceError(
            f"no such directory here, and the cache {_cache_dir(options)} contains no such Hub model{at} ({offline}). "
            f"Correct the path, or download the model first: hf download {model}",
            path=model,
        ) from error
    except (ValueError, OSError) as error:
        raise SourceError(f"the Hub cache can't be read: {error}", path=model) from error


def _cached_or_outline(model: str, options: HubOptions) -> str:
    """As :func:`_cached`; with ``options.outlines`` a config is enough."""
    try:
        return _cached(model, options.revision, options)
    except SourceError:
        if options.outlines is None:
            raise
        snapshot = _snapshot(model, options.revision, options)
        found = outline_of_cache(options.outlines(), model, snapshot, options.subfolder.strip("/"))
        if found is None:
            raise
        return found


def _cached(model: str, revision: str | None, options: HubOptions) -> str:
    """The folder of a snapshot in the cache, if it holds config and weights. Raises :class:`SourceError`."""
    folder = _snapshot(model, revision, options)
    files = [os.path.relpath(os.path.join(at, n), folder) for at, _, names in os.walk(folder) for n in names]
    try:
        at = inside(folder, *filter(None, [options.subfolder.strip("/")]))
        names, index = needed_files(
            files,
            subfolder=options.subfolder,
            choice=_choice(at, options),
            where=folder,
        )
    except SourceError as error:
        raise SourceError(
            f"the cache holds a part of {model} only, without the weights that are asked for. Run once online",
            path=folder,
        ) from error
    if index is not None:
        names += _listed_weights(inside(folder, index), options.subfolder.strip("/"))
    names += _whole_series(names)
    lost = sorted(name for name in set(names) if not os.path.isfile(os.path.join(folder, name)))
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        raise SourceError(
            f"the cache holds a part of {model} only: {', '.join(lost[:3])}{more} is not there. Run once online",
            path=folder,
        )
    return folder


def _whole_series(names: Iterable[str]) -> Iterator[str]:
    """All names of each series ``model-00001-of-00002.safetensors``, … of which one is named."""
    for stem, count, end in {m.groups() for name in names if (m := _NUMBERED.fullmatch(name))}:
        if int(count) <= 10_000:
            yield from (f"{stem}-{k:05}-of-{count}{end}" for k in range(1, int(count) + 1))


def _explained(error: BaseException, model: str, options: HubOptions) -> SourceError:
    """An error of the hub, the network or the disk, explained without the token."""
    from huggingface_hub import constants, errors

    while error.__cause__ is not None and not isinstance(error, errors.HfHubHTTPError):
        error = error.__cause__  # of a library that says it in its own words
    endpoint = constants.ENDPOINT
    at = f" at revision {options.revision!r}" if options.revision else ""
    if isinstance(error, errors.GatedRepoError):
        text = f"the model is gated: accept its conditions at {endpoint}/{model}, and give token= or run 'hf auth login'"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"no such directory here, and {endpoint} has no such model, or it is private and the token (token=, "
            f"HF_TOKEN, 'hf auth login') has no access. Correct the path or the id"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{endpoint} has the model, and nothing{at}"
    elif getattr(getattr(error, "response", None), "status_code", None) == 401:
        text = f"{endpoint} refused the token (401); give a valid token=, HF_TOKEN or 'hf auth login'"
    else:
        said = " ".join(str(error).split())
        if isinstance(options.token, str) and options.token:
            said = said.replace(options.token, "(token)")
        text = (
            f"no such directory here, and the download from {endpoint} failed: {type(error).__name__}: {said}"
        )
    return SourceError(text, path=model)


def pipeline_on_hub(model: str, options: HubOptions) -> tuple[str, dict[str, list[str]]] | None:
    """The local folder of a hub pipeline's ``model_index.json``, and the names in each folder of the repository, offline in that of the cache.

    None for anything else, also for what can't be had: whoever looks for a model there says why. Downloads that one file. Rank-local.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download

    if not is_hub_id(model):
        return None
    common: dict[str, Any] = {"token": options.token, "library_name": "shardwise"}
    try:
        if options.local_files_only or constants.HF_HUB_OFFLINE:
            at = _snapshot(model, options.revision, options)
            files = [os.path.relpath(os.path.join(here, n), at) for here, _, ns in os.walk(at) for n in ns]
            if PIPELINE_NAME not in files:
                return None
        else:
            info = HfApi(**common).model_info(model, revision=options.revision)
            files = [s.rfilename for s in info.siblings or ()]
            if PIPELINE_NAME not in files:
                return None
            common["cache_dir"] = _cache_dir(options)
            at = os.path.dirname(hf_hub_download(model, PIPELINE_NAME, revision=info.sha, **common))
    except MemoryError:
        raise
    except Exception:  # from huggingface_hub, its HTTP library or the disk
        return None
    folders: dict[str, list[str]] = {}
    for folder, _, name in (file.rpartition("/") for file in files):
        folders.setdefault(folder, []).append(name)
    return at, folders


# ----------------------------------------------------------------------------------------------------
# Which files


def needed_files(
    files: Iterable[str],
    *,
    subfolder: str = "",
    choice: Choice = _ANY,
    with_code: bool = False,
    modules: Collection[str] = (),
    where: str,
) -> tuple[list[str], str | None]:
    """The files of a repository that a load needs, and the index that names more of them, if there is one. Pure.

    Its documents (see :func:`.documents_among`, also for ``modules``); the weights that :func:`.chosen` takes, and those of an
    adapter; with ``with_code`` all Python files. Raises :class:`SourceError` naming ``where`` if
    there are no weights.
    """
    prefix = f"{subfolder.strip('/')}/" if subfolder.strip("/") else ""
    inner = {name.removeprefix(prefix): name for name in files if name.startswith(prefix)}
    here = sorted(name for name in inner if "/" not in name)
    wanted = documents_among(inner, modules)
    if with_code:
        wanted += [n for n in inner if n.endswith(".py")]
    adapter = next((n for n in ADAPTER_WEIGHTS if n in here), None) if ADAPTER_CONFIG in here else None
    wanted += [adapter] if adapter else []
    weights = chosen(here, choice, where)
    if weights is None and not choice.is_asked:
        wanted += (several := [n for n in here if n.endswith(".safetensors")])
        if several:
            return [inner[n] for n in dict.fromkeys(wanted)], None
    elif weights is not None:
        wanted.append(weights.name)
    if weights is None and adapter is None:
        kind = kind_in(here)
        if kind is not None and not kind.works:
            raise SourceError(kind.refusal(where), path=where)
        of = f" of {choice}" if choice.is_asked else ""
        other = sorted(
            {os.path.splitext(n)[1] for n in here if n.endswith((".gguf", ".safetensors", ".bin", ".pt"))}
        )
        raise SourceError(
            f"contains no {' and no '.join(choice.candidates)}{of}"
            + (f" in {subfolder!r}" if prefix else "")
            + (f"; it has {', '.join(other)} files under other names" if other else ""),
            path=where,
        )
    names = [prefix + n for n in dict.fromkeys(wanted)]
    return names, prefix + weights.name if weights is not None and weights.is_index else None


def _choice(folder: str, options: HubOptions) -> Choice:
    """The choice, with the caller's config or else that of a folder ("": it has none)."""
    if options.config is not None or not folder:
        return options.choice
    return replace(options.choice, config=config_in(folder))


def _listed_weights(file: str, folder: str) -> list[str]:
    """The files that an index names, as paths inside the repository: they are in the model's folder."""
    document = read_json(file, "index")
    found = document.get("weight_map") if isinstance(document, dict) else None
    names = {n for n in found.values() if isinstance(n, str)} if isinstance(found, dict) else set()
    return [inside(folder, name) for name in sorted(names)]


# ----------------------------------------------------------------------------------------------------
# What loaders of transformers models are asked for: their common arguments, and those of ``from_pretrained``.


class FromPretrained(TypedDict, total=False):
    """Keyword arguments of ``load_pretrained`` beside its own, with their meaning in transformers."""

    attn_implementation: str | dict[str, str] | None
    experts_implementation: str | dict[str, str] | None
    torch_dtype: torch.dtype | str | None
    """The former name of ``dtype``."""
    revision: str | None
    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    subfolder: str
    variant: str | None
    use_safetensors: bool | None
    local_files_only: bool
    force_download: bool


_WHOLE = "every rank gets its shards and nothing else, on the mesh's device (device= chooses another one)"
_MESH = (
    "give mesh= for FSDP and HSDP; for tensor parallelism shard the model yourself, or through the Accelerate "
    "integration, and load into it"
)
_OFFLOAD = "policy=ShardPolicy(cpu_offload=True) keeps the shards in host memory"
_GONE = "transformers ignores it, too"
_KERNELS = "set model.use_kernels after the load"

#: Every other keyword argument of transformers' ``from_pretrained`` (5.17-5.23, and 4 where still in use), with its
#: replacement.
REFUSED: Mapping[str, str] = {
    "adapter_kwargs": "adapter= accepts the adapter's local directory",
    "adapter_name": "adapter={name: directory} names it",
    "allow_all_kernels": _KERNELS,
    "code_revision": "code is that of the same revision=",
    "device_map": _WHOLE,
    "device_mesh": _MESH,
    "disable_mmap": "files are read by position, and none is mapped",
    "distributed_config": _MESH,
    "from_flax": _GONE,
    "from_tf": _GONE,
    "fusion_config": "fusing changes stored tensors and is not supported",
    "generation_config": "set model.generation_config after the load",
    "gguf_file": "GGUF is not supported: use the model's safetensors",
    "ignore_mismatched_sizes": (
        "build the model in sw.meta_init(), and say which tensors are new: sw.load(model, path, names=lambda n: "
        "n.replace('score.', 'old_score.'), allow_unused=('score.*',), allow_missing=('score.*',))"
    ),
    "kernel_config": _KERNELS,
    "low_cpu_mem_usage": "no rank ever holds more than its shards and io.staging_bytes",
    "max_memory": _WHOLE,
    "mirror": "set HF_ENDPOINT in the environment",
    "offload_buffers": _OFFLOAD,
    "offload_folder": _OFFLOAD,
    "offload_state_dict": _OFFLOAD,
    "output_loading_info": "the report says it: pass return_report=True, or call shardwise.reports.load_report(model)",
    "proxies": "set HTTPS_PROXY in the environment",
    "resume_download": _GONE,
    "state_dict": "save it as safetensors and load that: nothing else is proved complete",
    "tp_plan": _MESH,
    "tp_size": _MESH,
    "tqdm_class": "huggingface_hub shows the progress of a download (HF_HUB_DISABLE_PROGRESS_BARS=1 hides it)",
    "use_auth_token": "its name is token=",
    "use_kernels": _KERNELS,
    "weights_only": "only tensors are read from pickled files, and none of their code is run",
    "_commit_hash": "its name is revision=",
    "_fast_init": _GONE,
    "_from_auto": _GONE,
    "_from_pipeline": _GONE,
}


@frozen(kw_only=True)
class Arguments:
    """The caller's arguments, checked."""

    dtype: torch.dtype | str
    hub: HubOptions
    implementations: Mapping[str, Any]
    """Fields of the config: ``_attn_implementation``, ``_experts_implementation``."""


def understand(given: Mapping[str, Any], dtype: torch.dtype | str) -> Arguments:
    """Check keyword arguments of ``from_pretrained``. Rank-local.

    ``dtype`` is the call's own argument. Raises :class:`TypeError` naming the replacement of an argument that is not
    taken, :class:`ValueError` if ``torch_dtype`` contradicts ``dtype``, :class:`UnsupportedConversionError` for a
    request to quantize.
    """
    rest = dict(given)
    for name in ("quantization_config", "load_in_4bit", "load_in_8bit"):
        value = rest.pop(name, None)
        if value if name.startswith("load_in_") else value is not None:
            refuse_request({name: value} if name.startswith("load_in_") else value, f"{name}=")
    old_dtype = rest.pop("torch_dtype", None)
    if old_dtype is not None:
        if dtype != "auto" and _named_arguments(dtype) != _named_arguments(old_dtype):
            raise ValueError(
                f"dtype={dtype!r} and torch_dtype={old_dtype!r} differ; torch_dtype is the old name: pass only dtype"
            )
        dtype = old_dtype
    implementations = {
        f"_{name}": value
        for name in ("attn_implementation", "experts_implementation")
        if (value := rest.pop(name, None)) is not None
    }
    taken = HubOptions.__dataclass_fields__.keys() - {"config", "outlines"}
    hub = {name: rest.pop(name) for name in taken if name in rest}
    if hub.get("subfolder", "") is None:
        hub["subfolder"] = ""
    for name in rest:
        raise TypeError(f"load_pretrained takes no {name}=; {_instead(name)}")
    return Arguments(dtype=dtype, hub=HubOptions(**hub), implementations=implementations)


def _named_arguments(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


#: Arguments of ``load_pretrained`` that have no place in :class:`Pretrained`.
_OF_THE_CALL = ("mesh", "policy", "seed", "device", "io", "verify")


def _instead(name: str) -> str:
    known = (*FromPretrained.__annotations__, *Pretrained.__dataclass_fields__, *_OF_THE_CALL)
    if name not in REFUSED and (close := get_close_matches(name, known, n=1, cutoff=0.75)):
        return f"did you mean {close[0]}=?"
    return "leave it out: " + (
        REFUSED.get(name)
        or f"put config settings into a config: config = AutoConfig.from_pretrained(path, {name}=…), and "
        f"load_pretrained(path, …, config=config)"
    )


@frozen(kw_only=True)
class Pretrained:
    """Which model is built, and from what it is filled: what every loader of transformers models takes alike.

    See :func:`shardwise.load_pretrained` for the fields.
    """

    path: str | os.PathLike[str]
    dtype: torch.dtype | str
    auto_class: Any
    config: Any
    trust_remote_code: bool
    key_mapping: Mapping[str, str] | None
    allow_unused: Sequence[str]
    allow_missing: Sequence[str]
    adapter: Any
    quantized: Any
    options: Mapping[str, Any]
    """The keyword arguments of ``from_pretrained`` among the caller's."""
    vocab_size: int | None = None
    grow: Mapping[str, Any] | None = None
    with_modules: bool = False
    """As in :class:`.Choice`."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Pretrained:
        """Of a loader's own arguments, which have the names of the fields. It may have others, too."""
        return cls(**{one.name: arguments[one.name] for one in fields(cls) if one.name in arguments})

    def understood(self) -> Arguments:
        """``options``, ``dtype`` and declarations, checked. Raises :class:`TypeError` or :class:`ValueError`."""
        found = understand(self.options, self.dtype)
        if self.config is not None and not isinstance(self.config, str | os.PathLike):
            found = replace(found, hub=replace(found.hub, config=self.config))
        patterns_of("allow_unused", self.allow_unused)
        patterns_of("allow_missing", self.allow_missing)
        return found
