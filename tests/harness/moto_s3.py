"""moto's S3 server as a script: ``moto_s3.py PORT``. It ends when its standard input does, as with the process that started it.

moto's own entry point looks for the service of every request anew, which takes longer than the request. And moto compares before it
writes under a condition, and lists what another request changes: a store does each at once. So requests take turns here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay
    disable_nagle_algorithm = True

    def log_request(self, *args: Any) -> None:
        """Say nothing."""


def _one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., list[bytes]]:
    turn = threading.Lock()

    def serve(environ: dict[str, Any], start: Any) -> list[bytes]:
        with turn:
            reply = app(environ, start)
            try:
                return list(reply)
            finally:
                reply.close()  # type: ignore[attr-defined]

    return serve


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    served = _one_at_a_time(create_backend_app("s3"))
    run_simple("127.0.0.1", int(sys.argv[1]), served, threaded=True, request_handler=_Handler)
