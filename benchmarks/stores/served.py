"""A store in processes of its own, with a proxy before it that delays each reply and counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import shardwise as sw
from tests.harness.object_store import BUCKET, COUNTS, SECRET, Do, Proxy
from tests.harness.process import ROOT
from tests.harness.servers import SERVERS, NotInstalled

__all__ = ["MODEL", "Served", "as_client", "served"]

MODEL = f"s3://{BUCKET}/model"


@dataclass(frozen=True)
class Served:
    """A store that runs."""

    endpoint: str

    def counts(self) -> tuple[int, int]:
        """Requests that came, and bytes of bodies that were sent."""
        with urllib.request.urlopen(self.endpoint + COUNTS) as reply:
            found = json.loads(reply.read())
        return sum(found["requests"].values()), found["bytes_out"]


def as_client(endpoint: str) -> None:
    """Let this process use the bucket at an endpoint: shardwise, and the clients that read AWS's environment."""
    os.environ.update(AWS_ACCESS_KEY_ID="AKID", AWS_SECRET_ACCESS_KEY=SECRET, AWS_REGION="us-east-1")
    os.environ.update(AWS_DEFAULT_REGION="us-east-1", AWS_ENDPOINT_URL=endpoint)
    sw.configure_storage(f"s3://{BUCKET}", endpoint=endpoint, region="us-east-1")


@contextmanager
def served(server: str, latency_ms: float, folder: str | None = None) -> Iterator[Served]:
    """A store (a key of :data:`SERVERS`) until the end of the block. It holds the folders of ``folder``."""
    process = subprocess.Popen(
        [sys.executable, __file__, server, str(latency_ms), folder or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    assert process.stdin
    assert process.stdout
    try:
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            raise SystemExit(f"the store did not start: {server}")
        yield Served(endpoint)
    finally:
        process.stdin.close()
        process.wait()


def _serve(server: str, latency_ms: float, folder: str) -> None:
    """Until standard input ends."""
    with tempfile.TemporaryDirectory() as logs:
        try:
            with SERVERS[server](Path(logs)) as running:
                endpoint = running.options["endpoint"]
                as_client(endpoint)
                for name in sorted(os.listdir(folder)) if folder else []:
                    sw.copy_checkpoint(os.path.join(folder, name), f"s3://{BUCKET}/{name}")
                port = urlsplit(endpoint).port
                assert port
                with Proxy(port, lambda asked: Do(wait_s=latency_ms / 1000)) as proxy:
                    print(proxy.endpoint, flush=True)
                    sys.stdin.read()
        except NotInstalled as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), sys.argv[3])
