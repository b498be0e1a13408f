"""Import every module of the package: ``python -m tests.matrix.imports``. Modules of a feature whose gate is closed must say so or be absent."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback

import shardwise
from shardwise.errors import ShardwiseError
from tests.harness.versions import lacking

#: Module → its gate. Nothing else imports it before the gate is asked.
GATED = {"shardwise.models.kept_fp8": "kept-fp8"}


def main() -> int:
    failed = 0
    for found in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if found.name.endswith("__main__") or (found.name in GATED and lacking(GATED[found.name])):
            continue
        try:
            importlib.import_module(found.name)
        except ShardwiseError as error:  # the gate of an integration
            print(f"{found.name}: {error}")
        except Exception:
            failed += 1
            print(f"{found.name}:\n{traceback.format_exc()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
