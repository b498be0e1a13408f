"""``python -m shardwise``: the same as the command ``shardwise``."""

import sys

from .cli.commands import main

if __name__ == "__main__":
    sys.exit(main(prog_name="shardwise"))
