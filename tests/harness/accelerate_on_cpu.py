"""Runs a script under ``accelerate launch`` on CPU ranks as it would run on GPUs: Accelerate doesn't choose FSDP there.

accelerate launch --config_file FILE tests/harness/accelerate_on_cpu.py SCRIPT [ARGUMENTS]

Sets the shared state's distributed type to that of several GPUs; nothing else.
"""

from __future__ import annotations

import os
import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

os.environ["ACCELERATE_USE_CPU"] = "true"
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
