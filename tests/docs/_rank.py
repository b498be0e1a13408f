"""One rank of every torchrun command of a page, one command after another: ``python -m tests.docs._rank R COMMANDS``.

torchrun starts new processes for each command, and each imports torch for seconds. Here the processes stay; what a
script sees of torchrun (environment, arguments, a fresh process group) is the same.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

if __name__ == "__main__":
    rank, commands = int(sys.argv[1]), json.loads(sys.argv[2])
    for world_size, port, arguments in commands:
        if rank >= world_size:
            continue
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        print(f"END OF {' '.join(arguments)}", flush=True)
