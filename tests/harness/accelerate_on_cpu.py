"""Runs a script under ``accelerate launch`` on CPU ranks as it would run on GPUs: Accelerate doesn't choose FSDP there.

accelerate launch --config_file FILE tests/harness/accelerate_on_cpu.py SCRIPT [ARGUMENTS]

Sets the shared state's distributed type to that of several GPUs; nothing else. After a script that succeeded it ends the
process without Python's finalization: a thread of gloo may still hold the last collective's tensors, and a thread that
wants the GIL then aborts the process (pytorch/pytorch#179291). On a loaded machine that met 3 of 120 runs of case 1's
scripts, the author's own without shardwise among them.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading

from accelerate.state import PartialState
from accelerate.utils import DistributedType

os.environ["ACCELERATE_USE_CPU"] = "true"
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
threading._shutdown()  # as Python does first: pools of threads are told to end, and waited for
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
