"""One rank of a :class:`~tests.harness.launch.Launch`: ``python -m tests.harness.worker_once CALL RESULT``.

CALL is a file with the pickled call, RESULT the file that the result goes to. Exit status 0 when the
function returned, 1 when it raised (the traceback is on stderr).
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from tests.harness.process import exit_with_parent, install_stack_dump, resolve, warnings_as_in_pytest
from tests.harness.worker import GROUP_TIMEOUT


def main(call: str, result: str) -> NoReturn:
    """Answer the call and end the process."""
    status = _answer(Path(call), Path(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # Peers may be dead, and leaving a group of the dead in good order can wait for them.
    os._exit(status)


def _answer(call: Path, result: Path) -> int:
    install_stack_dump()
    exit_with_parent()
    torch.set_num_threads(1)
    try:
        target, payload = pickle.loads(call.read_bytes())
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        args, kwargs = pickle.loads(payload)
        fn = resolve(target)
        with warnings_as_in_pytest():
            value = fn(*args, **kwargs)
        result.write_bytes(pickle.dumps(value))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
