"""A server on this machine that speaks the part of the Hugging Face hub's HTTP that downloads of models use."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

__all__ = ["HubServer"]

TOKEN = "hf_right"


class HubServer:
    """Serves ``root/ORGANIZATION/NAME/REVISION/files``; a context manager. ``GET /log`` tells what was asked for.

    Names say how a repository behaves: ``gated-*`` wants the token, ``broken-*`` ends each safetensors file in the
    middle and fails when it is asked to go on, ``slow-*`` pauses for ``pause_s`` in the middle, ``stalls-*`` stops there.
    """

    def __init__(self, root: Path, *, pause_s: float = 0.0) -> None:
        self.root = root
        self.pause_s = pause_s
        self.log: list[tuple[str, str]] = []
        self.sent: Counter[str] = Counter()
        """Bytes of each file, by ``name/file``."""
        self.stalled = threading.Event()
        self._end = threading.Event()
        hub = self

        class Handler(_Handler):
            server_of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> Counter[str]:
        """How often each file's content was asked for, by ``name/file``."""
        return Counter(
            f"{path.split('/resolve/')[0].rpartition('/')[2]}/{path.split('/resolve/')[1].partition('/')[2]}"
            for method, path in self.log
            if method == "GET" and "/resolve/" in path
        )

    def commit_of(self, repository: Path, revision: str) -> tuple[str, Path] | None:
        """The commit of a branch, or of itself, and its directory."""
        for folder in sorted(repository.iterdir()) if repository.is_dir() else ():
            commit = hashlib.sha1(str(folder.relative_to(self.root)).encode()).hexdigest()
            if revision in (folder.name, commit):
                return commit, folder
        return None

    def environment(self, home: Path, *, offline: bool = False) -> dict[str, str]:
        """The variables with which huggingface_hub asks this server, and caches below ``home``."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def wait(self) -> None:
        """Until the server ends."""
        self.stalled.set()
        self._end.wait()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_of
        path = unquote(urlsplit(self.path).path)
        if path == "/log":
            return self._send(200, json.dumps(dict(hub.fetched())).encode(), {})
        hub.log.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, rest = parts[2:4], parts[4:]
        else:
            name, rest = parts[:2], parts[2:]
        repository = hub.root.joinpath(*name)
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            return self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if not repository.is_dir():
            return self._send(401 if given is None else 404, b"", {"X-Error-Code": "RepoNotFound"})
        if name[1].startswith("gated-") and given is None:
            return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        verb, revision = (rest[0], rest[1]) if rest else ("revision", "main")
        found = hub.commit_of(repository, revision)
        if found is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit, folder = found
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        if verb == "revision":
            return self._json(
                {"id": "/".join(name), "sha": commit, "siblings": [{"rfilename": f} for f in files]}
            )
        if verb == "tree":
            return self._json([_entry(folder, file) for file in files])
        file = "/".join(rest[2:])
        if file not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        return self._file(folder / file, name[1], commit)

    def _file(self, file: Path, repository: str, commit: str) -> None:
        content = file.read_bytes()
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(content)) + 1, len(content))
        kind = repository.partition("-")[0]
        is_odd = self.command == "GET" and file.suffix == ".safetensors"
        if is_odd and kind == "broken" and start:
            return self._send(500, b"", {})
        if (start, stop) != (0, len(content)):
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        if not is_odd or kind not in ("broken", "slow", "stalls"):
            if self.command == "GET":
                self.server_of.sent[f"{repository}/{file.name}"] += stop - start
            return self._send(
                206 if (start, stop) != (0, len(content)) else 200, content[start:stop], headers
            )
        self._head(200, len(content), headers)
        half = len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        if kind == "broken":
            self.close_connection = True
        elif kind == "stalls":
            self.server_of.wait()
        else:
            time.sleep(self.server_of.pause_s)
            self.wfile.write(content[half:])

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self._head(status, len(content), headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def _entry(folder: Path, file: str) -> dict[str, Any]:
    content = (folder / file).read_bytes()
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
