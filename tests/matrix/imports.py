"""Import every module of the package: ``python -m tests.matrix.imports``. Modules of a feature whose gate is closed must say so or be absent."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from importlib.util import find_spec

import shardwise
from shardwise.errors import ShardwiseError
from tests.harness.versions import lacking

#: Module → its gate. Nothing else imports it before the gate is asked.
GATED = {"shardwise.models.kept_fp8": "kept-fp8"}
#: Module → a package that isn't installed here, and imports the module itself.
ELSEWHERE = {"shardwise.integrations._vllm": "vllm"}


def main() -> int:
    failed = 0
    for found in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if found.name.endswith("__main__") or (found.name in GATED and lacking(GATED[found.name])):
            continue
        if found.name in ELSEWHERE and find_spec(ELSEWHERE[found.name]) is None:
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
