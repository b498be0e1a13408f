"""``examine``: collects the facts, meets the other ranks if there are any, and applies the table of rules."""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from ..catalog.pipelines import Pipeline, pipeline_at
from ..catalog.records import PIPELINE, kind_of
from ..errors import ShardwiseError, SourceError
from ..format.header import OTHERS_NAME, TRAINER_FILE
from ..format.manifest import MANIFEST_NAME
from ..limits import brief
from ..objects import frozen
from ..runs.history import losses_in, losses_of_steps, numbered_steps, others_steps, rates_in
from ..storage import absolute, is_directory, is_file, names_in
from ..storage.records import is_url
from .facts import (
    Bucket,
    Checkpoint,
    Facts,
    Finding,
    Foreign,
    Meeting,
    Place,
    Seen,
    Settings,
    count,
    launch_variables,
    look_at_machine,
    number,
    requirements,
    versions,
)
from .files import (
    ARGUMENTS_FILE,
    PREFIX,
    delete_probes,
    holds_checkpoint,
    holds_weights,
    is_accelerate,
    is_arguments,
    look_at_bucket,
    look_at_checkpoint,
    look_at_model,
    look_at_pipeline,
    look_at_place,
    look_at_stored_model,
    look_for_lost,
    read_pickled_arguments,
    read_settings,
)
from .logs import log_of_losses, read_log
from .rules import RULES

# ----------------------------------------------------------------------------------------------------
# Collects the facts: of this machine, and of each path that was given. Judges nothing.

#: What all paths of one call may take, and one path.
_ALL_S, _EACH_S = 12.0, 10.0
#: Files of the given paths that ranks compare.
_MOST_FILES = 2_000


#: Of the numbered checkpoints of the Trainer or Accelerate, the newest that are looked at.
_STEPS_CHECKED = 3
#: Those whose names are read, and how many next to each are compared with it.
_STEPS_LISTED, _NEIGHBORS = 200, 4


#: What the given paths turned out to be, by the field of :class:`Facts`.
_Found = defaultdict[str, list[Any]]


def collect(paths: Iterable[str], *, outputs: Iterable[str] = (), ranks: int | None = None) -> Facts:
    """Facts of this machine and of ``paths``. Rank-local.

    A path may be an Accelerate YAML, TrainingArguments as JSON or in ``training_args.bin``, a model directory, a checkpoint or a
    directory of them, a ``trainer_state.json``, a log, a URL, or a directory in which a run will write. ``outputs``: directories or URLs in which a run will write; one
    that does not exist yet is looked at through the nearest directory above it. ``ranks``: how many are to run on this host; None: as the launcher, the given YAML or the devices
    say. Writes at most 64 MiB into each directory to be written, and deletes them. Takes at most about 20 s.

    Raises :class:`SourceError` for a path that can't be read.
    """
    found, taken_for, silent = _Found(list), dict[str, str](), dict[str, float]()
    end = time.monotonic() + _ALL_S
    for look, path in (*((_look_at, path) for path in paths), *((_look_at_output, path) for path in outputs)):
        if "\0" in os.fspath(path):
            raise SourceError("no path has a NUL character", path=brief(os.fspath(path)))
        path, limit_s = absolute(path), max(2.0, min(_EACH_S, end - time.monotonic()))
        words = _look_with_limit(look, path, found, limit_s)
        if words is None:
            silent[path] = limit_s
        taken_for[path] = words or f"unknown: its storage didn't respond within {limit_s:.0f} s"
    environment = launch_variables()
    machine = look_at_machine()
    return Facts(
        ranks=ranks or _ranks_here(environment, found["accelerate"], machine.gpus),
        machine=machine,
        software=versions(),
        environment=environment,
        requirements=requirements(),
        taken_for=taken_for,
        silent=silent,
        **cast(Any, {name: tuple(things) for name, things in found.items()}),
    )


def _ranks_here(environment: dict[str, str], accelerate: list[Settings], gpus: int) -> int:
    given = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_NTASKS_PER_NODE") or ""
    if given.isdecimal() and int(given):
        return int(given)
    for settings in accelerate:
        processes = number(settings.values.get("num_processes"))
        machines = number(settings.values.get("num_machines"))
        if processes:
            return max(1, processes // (machines or 1))
    return max(1, gpus)


def _look_with_limit(
    look_at: Callable[[str, _Found], str], path: str, found: _Found, limit_s: float
) -> str | None:
    """Look in a thread: a call into storage that hangs does not return. What comes too late is left out; then None."""
    seen, words, errors = _Found(list), list[str](), list[Exception]()

    def look() -> None:
        try:
            words.append(look_at(path, seen))
        except Exception as error:  # raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(look,), daemon=True, name="shardwise-doctor")
    try:
        thread.start()
        thread.join(limit_s)
    except BaseException:  # Ctrl-C, or a signal that the command turned into an exit
        delete_probes()  # the thread ends with the process
        raise
    if thread.is_alive():
        return None
    for error in errors:
        raise error
    for name, things in seen.items():
        found[name] += things
    return words[0]


# Each of these notes facts of a path, and returns what the path was taken for.


def _look_at(path: str, found: _Found) -> str:
    if is_url(path):
        return _look_at_url(path, found)
    if os.path.isdir(path):
        return _look_in(path, found)
    if os.path.lexists(path):
        return _look_at_file(path, found)
    found["absent"].append(path)
    return "nothing: it doesn't exist"


def _look_at_output(path: str, found: _Found) -> str:
    """As :func:`_look_at`; a directory that does not exist is going to be made."""
    if is_url(path) or os.path.lexists(path):
        return _look_at(path, found)
    above = path
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    found["places"].append(replace(look_at_place(above), path=path))
    return f"a directory that the run will create; wrote test files to {above}"


def _look_in(path: str, found: _Found) -> str:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise SourceError(f"can't be read: {error.strerror or error}", path=path) from error
    if (pipeline := _pipeline_in(path)) is not None:
        models = look_at_pipeline(pipeline, path)
        found["models"] += models
        return f"{PIPELINE.name}, with {', '.join(os.path.basename(one.path) for one in models if one.path != path)}"
    foreign = _note_foreign(path, found)
    if holds_checkpoint(path, names):
        checkpoint = look_for_lost(look_at_checkpoint(path, names), names, _beside(path))
        found["checkpoints"].append(checkpoint)
        if checkpoint.kind != "step" and any(name.endswith(".safetensors") for name in names):
            found["models"].append(look_at_model(path))
        if checkpoint.kind == "steps":  # a run continues in it
            found["places"].append(look_at_place(path))
            return foreign or _words_of(checkpoint)
        return (foreign or _words_of(checkpoint)) + _and_its_run(path, found)
    if others := others_steps(path):
        return _look_at_numbered(path, others, found)
    if holds_weights(names):
        found["models"].append(look_at_model(path))
        return "a model directory" + _and_its_run(path, found)
    if not foreign:
        found["places"].append(look_at_place(path))
    return foreign or "a directory to write to; wrote test files to it and deleted them"


def _pipeline_in(path: str) -> Pipeline | None:
    try:
        return pipeline_at(path)
    except ShardwiseError:  # of no use: noted as foreign
        return None


def _and_its_run(path: str, found: _Found) -> str:
    """Look at the numbered checkpoints in an ``output_dir`` that also has the final model; words for that."""
    if not (steps := numbered_steps(path)):
        return ""
    words = _look_at_numbered(path, steps, found)
    # That model is what the run made: its first loss says nothing of how it was loaded.
    found["logs"] = [replace(log, first_loss=None) for log in found["logs"]]
    return f", and {words}"


def _beside(path: str) -> list[list[str]]:
    """The names in the numbered checkpoints of the HF Trainer or Accelerate that are next to one, by their steps."""
    if not (own := OTHERS_NAME.fullmatch(os.path.basename(path))):
        return []
    try:
        steps = numbered_steps(os.path.dirname(path))
        near = sorted(
            (step for step in steps if step != int(own[1])), key=lambda step: abs(step - int(own[1]))
        )
        listed = [os.listdir(steps[step]) for step in near[:_NEIGHBORS]]
    except OSError:
        return []  # the directory above may be another user's
    return [names for names in listed if MANIFEST_NAME not in names]


def _look_at_numbered(path: str, steps: Mapping[int, str], found: _Found) -> str:
    """A Trainer's ``output_dir``, or an Accelerate project."""
    for place in [*steps.values()][:_STEPS_CHECKED]:
        names = os.listdir(place)
        if holds_checkpoint(place, names):
            found["checkpoints"].append(
                look_for_lost(look_at_checkpoint(place, names), names, _beside(place))
            )
    for place in [*steps.values()][_STEPS_CHECKED:_STEPS_LISTED]:
        names = os.listdir(place)
        kind = "step" if MANIFEST_NAME in names else "full"
        older = look_for_lost(Checkpoint(path=place, kind=kind), names, _beside(place))
        found["checkpoints"] += [older] * bool(older.lost or older.lost_files)
    found["places"].append(look_at_place(path))
    words = f"a run of the HF Trainer or Accelerate, {_some_steps(steps)}"
    if losses := losses_of_steps(steps):
        file, points = losses
        found["logs"].append(log_of_losses(file, points, steps, rates_in(file)))
        words += f"; {count(len(points), 'loss', 'losses')} in {os.path.relpath(file, path)}"
    return words


def _look_at_url(url: str, found: _Found) -> str:
    try:
        if is_file(url):
            found["unknown"].append(url)
            return "an object, which doctor doesn't open"
        names = names_in(url)
    except SourceError as error:
        found["buckets"].append(Bucket(url=url, failures={"list": str(error)}))
        return "a URL to write to, which can't be listed"
    if foreign := _note_foreign(url, found):
        return foreign
    words = "a URL to write to; wrote test objects to it and deleted them"
    if names and holds_checkpoint(url, names):
        checkpoint = look_at_checkpoint(url, names)
        found["checkpoints"].append(checkpoint)
        words = _words_of(checkpoint)
    elif names and holds_weights(names):
        found["models"].append(look_at_stored_model(url, names))
        return "a model"  # it may well be read-only
    found["buckets"].append(look_at_bucket(url))
    return words


def _note_foreign(path: str, found: _Found) -> str | None:
    """The name of the kind of a path that can't be read, which is noted; None for any other path."""
    kind = kind_of(path)
    if kind is None or kind.works:
        return None
    found["foreign"].append(Foreign(path=path, name=kind.name, instead=kind.line(path)))
    return kind.name


def _look_at_file(path: str, found: _Found) -> str:
    if foreign := _note_foreign(path, found):
        return foreign
    name = os.path.basename(path)
    if name == TRAINER_FILE:
        folder = os.path.dirname(path)  # one of its checkpoints, or the directory of them
        root = os.path.dirname(folder) if OTHERS_NAME.fullmatch(os.path.basename(folder)) else folder
        points = losses_in(path)
        found["logs"].append(log_of_losses(path, points, numbered_steps(root), rates_in(path)))
        return f"the HF Trainer's state, {count(len(points), 'loss', 'losses')}"
    if name == ARGUMENTS_FILE:
        found["arguments"].append(read_pickled_arguments(path))
        return "TrainingArguments, read from a pickle without running it"
    if path.endswith((".yaml", ".yml", ".json")):
        settings = read_settings(path)
        if is_arguments(settings):
            found["arguments"].append(settings)
            return "TrainingArguments"
        if is_accelerate(settings):
            found["accelerate"].append(settings)
            return "an Accelerate configuration"
    elif os.path.isfile(path) and not path.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt")):
        log = read_log(path)
        found["logs"].append(log)
        return f"a log, {count(log.losses, 'loss', 'losses')}, {count(len(log.lines), 'known line')}"
    found["unknown"].append(path)
    return "nothing that doctor recognizes"


def _words_of(checkpoint: Checkpoint) -> str:
    if checkpoint.kind == "steps":
        return f"a directory of checkpoints, {_some_steps(checkpoint.steps)}"
    if checkpoint.kind == "step":
        return "a checkpoint"
    kind = kind_of(checkpoint.path)
    return "another program's checkpoint" if kind is None else kind.name


def _some_steps(steps: Collection[int]) -> str:
    if not steps:
        return "without a step"
    newest = sorted(steps)[-_STEPS_CHECKED:]
    return f"{'step' if len(steps) == 1 else 'steps'} {'… ' * (len(steps) > len(newest))}{', '.join(map(str, newest))}"


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of every local file at or below ``paths``, for comparison with other ranks; at most 2,000 files."""
    found: dict[str, int] = {}
    for path in map(absolute, paths):
        if is_url(path):
            continue
        if os.path.isfile(path):
            found[path] = os.path.getsize(path)
        elif is_directory(path):
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(f for f in folders if not f.startswith(PREFIX))
                for name in sorted(names):
                    if name.startswith(PREFIX):
                        continue
                    try:
                        found[os.path.join(folder, name)] = os.stat(os.path.join(folder, name)).st_size
                    except OSError:
                        continue
                    if len(found) >= _MOST_FILES:
                        return found
    return found


# ----------------------------------------------------------------------------------------------------
# Ranks under a launcher tell each other what they saw, through a store and without a process group.
#
# A process group can't start while a rank is missing, and does not say which one. Here each rank says that it is there, and rank
# 0 names those that do not come. Every wait has an end.

_CONNECT_S = 8.0
#: After its own facts, rank 0 waits so long for a rank that has started, and for one that has not.
_STARTED_S, _ABSENT_S = 8.0, 6.0
#: A file that another rank wrote must be seen within this time.
_SEEN_S = 2.0
_REPLY_S, _POLL_S = 4.0, 0.05
#: All waits end so long after the rank has looked for the store, whatever its own facts took; the last ones get a second.
_MEETING_S = 26.0
_UNLIMITED = 1e18


@frozen(kw_only=True)
class Assembly:
    """This rank's seat among the ranks of a launch. ``store`` is None if there is a ``problem``."""

    rank: int
    world_size: int
    is_first_here: bool
    """Whether it is the first rank of its host."""
    store: Any
    """A torch.distributed.Store, whose stub says str where it takes and gives bytes."""
    problem: str
    """Why the store can't be had."""
    began_s: float
    hosts_store: bool

    def exchange(self, facts: Facts, findings: Iterable[Finding], files: Mapping[str, int]) -> Meeting | None:
        """Tell the other ranks, and wait for them; every rank calls it. Rank 0 gets the meeting, the other ranks None.

        A rank that does not hear of rank 0 gets a meeting that names rank 0 as missing. Takes about 25 s at most.
        """
        if self.store is None:
            return self._alone()
        marks = [os.path.join(p.path, f"{PREFIX}rank-{self.rank}") for p in _shared(facts.places)]
        try:
            for mark in marks:
                _touch(mark)
            self.store.set(f"here/{self.rank}", b"1")
            self.store.add("here", 1)
            present = self._present()
            if present is None:
                return self._alone()
            clock_s = time.time()
            seen = Seen(
                rank=self.rank,
                host=facts.machine.network.host,
                versions=facts.software,
                limits=_limits(facts),
                clock_s=clock_s,
                files=dict(files) if self.is_first_here else None,
                unseen=_unseen(facts.places, present, self.rank),
                findings=tuple(map(asdict, findings)) if self.is_first_here else (),
            )
            self.store.set(f"seen/{self.rank}", json.dumps(asdict(seen)).encode())
            self.store.add("seen", 1)
            if self.rank == 0:
                return self._gathered(present)
            if not self._comes("done", _SEEN_S + 2 * _REPLY_S):
                return self._alone()  # rank 0 is missing
            self.store.add("left", 1)
            return None
        except dist.DistError:  # the store ended with rank 0, or with the launcher
            return self._alone()
        finally:
            for mark in marks:
                _remove(mark)

    def _present(self) -> list[int] | None:
        """The ranks that are there, as rank 0 says; None if it does not."""
        if self.rank != 0:
            # rank 0 may look for longer than this rank did
            return json.loads(self.store.get("present")) if self._comes("present", _MEETING_S) else None
        started, absent = self._end(_STARTED_S), self._end(_ABSENT_S)
        while self.store.add("here", 0) < self.world_size:
            now = time.monotonic()
            if now > started or (now > absent and self.store.add("started", 0) < self.world_size):
                break
            time.sleep(_POLL_S)
        present = [r for r in range(self.world_size) if self.store.check([f"here/{r}"])]
        self.store.set("present", json.dumps(present).encode())
        return present

    def _gathered(self, present: list[int]) -> Meeting:
        end = self._end(_SEEN_S + _REPLY_S)
        while self.store.add("seen", 0) < len(present) and time.monotonic() < end:
            time.sleep(_POLL_S)
        known = [r for r in present if self.store.check([f"seen/{r}"])]
        ranks = tuple(_read(self.store.get(f"seen/{r}")) for r in known)
        self.store.set("done", b"1")
        if self.hosts_store:  # it ends with this process
            end = self._end(_REPLY_S)
            while self.store.add("left", 0) < len(known) - 1 and time.monotonic() < end:
                time.sleep(_POLL_S)
        return Meeting(
            world_size=self.world_size,
            ranks=ranks,
            missing=tuple(r for r in range(self.world_size) if r not in known),
            waited_s=time.monotonic() - self.began_s,
        )

    def _end(self, limit_s: float) -> float:
        """When a wait of ``limit_s`` ends, of which all waits leave at least a second."""
        now = time.monotonic()
        return now + max(1.0, min(limit_s, self.began_s + _MEETING_S - now))

    def _comes(self, key: str, limit_s: float) -> bool:
        try:
            self.store.wait([key], timedelta(seconds=self._end(limit_s) - time.monotonic()))
            return True
        except dist.DistError:
            return False

    def _alone(self) -> Meeting:
        cant_host = self.hosts_store and self.store is None
        return Meeting(
            world_size=self.world_size,
            ranks=(),
            missing=() if cant_host else (0,),
            waited_s=time.monotonic() - self.began_s,
            problem=self.problem if cant_host else None,
        )


def assembly_of(environment: Mapping[str, str]) -> Assembly | None:
    """This rank's seat, if a launcher has set rank, world size and the store's address; otherwise None.

    Every rank calls it, before it looks at anything. Connects within 8 s.
    """
    rank, world_size = number(environment.get("RANK")), number(environment.get("WORLD_SIZE"))
    address, port = environment.get("MASTER_ADDR"), number(environment.get("MASTER_PORT"))
    if rank is None or world_size is None or not address or not port or port >= 65_536:
        return None
    if world_size < 2 or rank >= world_size:
        return None
    began = time.monotonic()
    hosts_store = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: Any = None
    problem = "" if hosts_store or _answers(address, port) else f"no answer from {address}:{port}"
    try:
        if problem:
            raise dist.DistError(problem)
        tcp = dist.TCPStore(  # type: ignore[attr-defined]  # public, without __all__
            address,
            port,
            world_size,
            hosts_store,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
        # A launcher that starts the ranks again keeps its store.
        prefix = f"shardwise-doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '')}"
        store = dist.distributed_c10d.PrefixStore(prefix, tcp)
        store.add("started", 1)
    except dist.DistError as error:
        store, problem = None, problem or " ".join(str(error).split())[:200]
    return Assembly(
        rank=rank,
        world_size=world_size,
        is_first_here=environment.get("LOCAL_RANK", "0") == "0",
        store=store,
        problem=problem,
        began_s=began,
        hosts_store=hosts_store,
    )


def _answers(address: str, port: int) -> bool:
    """Whether something listens there, or does so soon: torch's own client takes twice its timeout, and prints stacks."""
    end = time.monotonic() + _CONNECT_S
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=2.0).close()
            return True
        except OSError:
            time.sleep(4 * _POLL_S)
    return False


def _read(raw: bytes) -> Seen:
    found: dict[str, Any] = json.loads(raw)
    unseen = {path: tuple(ranks) for path, ranks in found.pop("unseen").items()}
    return Seen(**{**found, "unseen": unseen, "findings": tuple(found["findings"])})


def _limits(facts: Facts) -> dict[str, float]:
    machine = facts.machine
    found: dict[str, float | None] = {
        "cores": machine.cores.usable,
        "GPUs": machine.gpus,
        "RLIMIT_NOFILE": machine.limits.open_files,
        "RLIMIT_FSIZE": machine.limits.file_bytes,
    }
    if machine.memory is not None:
        found["memory (bytes)"] = machine.memory.limit_bytes
        found["/dev/shm (bytes)"] = machine.memory.shm_bytes or 0
    return {name: _UNLIMITED if value is None else float(value) for name, value in found.items()}


# ----------------------------------------------------------------------------------------------------
# Files by which ranks see whether they share a directory


def _shared(places: Iterable[Place]) -> list[Place]:
    return [p for p in places if not p.failures.get("write") and os.path.isdir(p.path)]


def _unseen(places: Iterable[Place], present: list[int], own: int) -> dict[str, tuple[int, ...]]:
    end = time.monotonic() + _SEEN_S
    left = {p.path: [r for r in present if r != own] for p in _shared(places)}
    while any(left.values()):
        for path, ranks in left.items():
            left[path] = [r for r in ranks if not os.path.exists(os.path.join(path, f"{PREFIX}rank-{r}"))]
        if time.monotonic() > end:
            break
        time.sleep(_POLL_S)
    return {path: tuple(ranks) for path, ranks in left.items() if ranks}


def _touch(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError:
        return  # the probe has said so


def _remove(path: str) -> None:
    try:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and not status.st_size:  # as `_touch` makes it
            os.unlink(path)
    except OSError:
        return


# ----------------------------------------------------------------------------------------------------
# ``examine``: collect the facts, meet the other ranks if there are any, and apply the rules.


def findings_of(facts: Facts) -> list[Finding]:
    """What the rules find, problems before notes, and in the order of the table. Pure; takes milliseconds."""
    found = [finding for rule in RULES for finding in rule.findings(facts)]
    return sorted(found, key=lambda finding: finding.kind == "note")


@frozen(kw_only=True)
class Diagnosis:
    """What was seen, and what the rules say of it."""

    facts: Facts
    findings: tuple[Finding, ...]
    speaks: bool
    """Whether this rank reports: rank 0, one without a launcher, or one that does not hear of rank 0."""

    @property
    def bites(self) -> bool:
        """Whether a finding is more than a note."""
        return any(finding.kind == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "ok": not self.bites,
            "rules": len(RULES),
            "findings": [asdict(finding) for finding in self.findings],
            "facts": _plain(asdict(self.facts)),
        }


def examine(paths: Sequence[str] = (), *, outputs: Sequence[str] = (), ranks: int | None = None) -> Diagnosis:
    """Look at this machine and these paths, and say what will bite. Takes at most about 30 s.

    Under a launcher every rank calls it with the same paths; the ranks compare what they see. ``outputs``: where the
    run will write, also directories that it will make. ``ranks``: how many are to run
    on this host. Installs and changes nothing; a probe of a directory writes at most 64 MiB, and deletes them. Raises
    :class:`SourceError` for a path that can't be read.
    """
    assembly = assembly_of(launch_variables())
    facts = collect(paths, outputs=outputs, ranks=ranks)
    findings = findings_of(facts)
    if assembly is None:
        return Diagnosis(facts=facts, findings=tuple(findings), speaks=True)
    answering = [path for path in (*paths, *outputs) if absolute(path) not in facts.silent]
    meeting = assembly.exchange(facts, findings, sizes_of(answering))
    if meeting is None:
        return Diagnosis(facts=facts, findings=tuple(findings), speaks=False)
    facts = replace(facts, meeting=meeting)
    findings = findings_of(facts)
    return Diagnosis(facts=facts, findings=(*findings, *_of_other_hosts(meeting, findings)), speaks=True)


def _of_other_hosts(meeting: Meeting, own: Iterable[Finding]) -> list[Finding]:
    """What the first ranks of other hosts found and this one did not."""
    known = {(f.rule, f.bites) for f in own}
    found = []
    for seen in meeting.ranks:
        for raw in seen.findings:
            one = Finding(**cast(Any, raw))
            if (one.rule, one.bites) not in known:
                known.add((one.rule, one.bites))
                found.append(replace(one, where=f"rank {seen.rank} ({seen.host}): {one.where}"))
    return found


def _plain(value: Any) -> Any:
    """What a YAML may hold beside JSON's values (dates, sets), as text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
