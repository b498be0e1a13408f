"""One rank of the pool, which a fork server starts with ``main(FD)``.

Commands come from the parent as tuples, one reply goes back for each: ``("ok", bytes)`` with the pickled
result, or ``("error", text)`` with the traceback.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, debug

from tests.harness.channel import Channel
from tests.harness.process import exit_with_parent, install_stack_dump, resolve, warnings_as_in_pytest

#: A collective that waits longer than this raises, which tells more than the pool's own timeout.
GROUP_TIMEOUT = timedelta(seconds=60)

_HOST = "127.0.0.1"


class Worker:
    """Holds the process group, and the store where this is rank 0."""

    def __init__(self) -> None:
        self._hosted: dist.TCPStore | None = None

    def leave(self) -> None:
        """Leave the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
        # Cached sharding decisions hold meshes, and those hold names of groups that no longer exist.
        if clear := getattr(debug, "_clear_sharding_prop_cache", None):
            clear()
        else:  # torch 2.9
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        self._hosted = None
        gc.collect()  # meshes lie in cycles, and a group's threads run until it is gone
        gc.freeze()  # later collections look only at newer objects

    def host(self) -> int:
        """Serve a fresh store from this rank; its port."""
        self._hosted = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        return self._hosted.port

    def join(self, rank: int, world_size: int, port: int) -> None:
        """Enter a gloo group of that size, with the variables that torchrun would have set."""
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
        }
        store = self._hosted or dist.TCPStore(_HOST, port, is_master=False, timeout=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)

    def call(self, target: str, payload: bytes, test: str) -> Any:
        """Call a function of a test module with pickled arguments, from the same seed every time."""
        _count_lines_for(test)
        fn = resolve(target)
        args, kwargs = pickle.loads(payload)
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        with warnings_as_in_pytest():
            return fn(*args, **kwargs)


def _count_lines_for(test: str) -> None:
    """If coverage is measured here: the lines that run from now on count for ``test``."""
    coverage = sys.modules.get("coverage")
    running = coverage.Coverage.current() if coverage else None
    if running:
        running.switch_context(test.partition("[")[0].partition(" ")[0])


def _answer(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "ok", pickle.dumps(work(*args))
    except BaseException:  # SystemExit and pytest's own outcomes too: a rank always answers
        return "error", traceback.format_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(fd: str) -> None:
    install_stack_dump()
    exit_with_parent()
    torch.set_num_threads(1)
    # At the default of 700, collections took a few per cent of the CPU time of the tests.
    gc.set_threshold(20_000)
    channel = Channel(socket.socket(fileno=int(fd)))
    channel.sock.set_inheritable(False)
    worker = Worker()
    while True:
        try:
            command, *args = channel.receive()
        except EOFError:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # as torchrun's ranks that are done; threads of groups would take seconds to end
        channel.send(_answer(getattr(worker, command), tuple(args)))
