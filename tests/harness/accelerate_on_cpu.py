"""Runs a script under ``accelerate launch`` on CPU ranks as it would run on GPUs: Accelerate doesn't choose FSDP there.

accelerate launch --config_file FILE tests/harness/accelerate_on_cpu.py SCRIPT [ARGUMENTS]

Sets the shared state's distributed type, and the plugin that it makes of the environment then; nothing else.
"""

from __future__ import annotations

import os
import runpy
import sys

from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, TorchDynamoPlugin

os.environ["ACCELERATE_USE_CPU"] = "true"
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.FSDP
AcceleratorState(cpu=True, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True)
plugin = FullyShardedDataParallelPlugin()
if AcceleratorState().mixed_precision != "no":
    plugin.set_mixed_precision(AcceleratorState().mixed_precision)
AcceleratorState._shared_state["fsdp_plugin"] = plugin
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
