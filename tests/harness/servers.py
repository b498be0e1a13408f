"""Stores that others wrote, each in processes of its own, with an empty bucket: what ``tests/storage/test_servers.py`` runs against.

``make servers`` installs those that pip does not bring.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tests.harness.object_store import BUCKET, SECRET, s3_server
from tests.harness.process import ROOT

__all__ = ["SERVERS", "NotInstalled", "Running", "allow_guest", "as_owner", "ceph_is_installed"]

#: Where ``make servers`` puts them.
_INSTALLED = ROOT / "build" / "servers"
_START_S = 90.0
#: azurite's own, from its documentation.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_GUEST = "guest"
_CEPH_TOOLS = ("monmaptool", "ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")
_CEPH_CONF = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{port},v1:127.0.0.1:{old_port}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
run dir = {folder}
crash dir = {folder}
admin socket =
log file = {folder}/$name.log
pid file = {folder}/$name.pid
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
mon data avail crit = 1
mon allow pool size one = true
mon max pg per osd = 1000
osd objectstore = memstore
memstore device bytes = 8589934592
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
"""


class NotInstalled(Exception):
    """A server is not on this machine; the text says how to install it."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server with an empty bucket."""

    root: str
    """The bucket's URL."""
    options: dict[str, Any]
    """For ``configure_storage``, and for obstore."""
    guest: str | None = None
    """Access key of another user, who has no rights yet, and the same secret."""


@contextmanager
def _moto(folder: Path) -> Iterator[Running]:
    with s3_server(folder) as server:
        yield _s3(f"http://127.0.0.1:{server.port}")


@contextmanager
def _azurite(folder: Path) -> Iterator[Running]:
    """Microsoft's emulator of Azure's blobs."""
    script = _INSTALLED / "node_modules" / ".bin" / "azurite-blob"
    program = str(script) if script.exists() else shutil.which("azurite-blob")
    if program is None or shutil.which("node") is None:
        raise NotInstalled("azurite is not installed: make servers, or npm install -g azurite")
    port = _free_port()
    command = [
        program,
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--silent",
        "--skipApiVersionCheck",
    ]
    with ExitStack() as running:
        _start(running, [*command, "--disableTelemetry", "--inMemoryPersistence"], folder, os.environ)
        endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
        _until(lambda: _make_container(port, "container"), folder)
        options = {"account_name": _ACCOUNT, "account_key": _ACCOUNT_KEY, "endpoint": endpoint}
        yield Running("az://container", {**options, "client_options": {"allow_http": True}})


def _make_container(port: int, name: str) -> bool:
    """Azure's request to make a container, signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{key}:{value}\n" for key, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{named}/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(_ACCOUNT_KEY), text.encode(), hashlib.sha256)
    signed = {**headers, "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("PUT", f"/{_ACCOUNT}/{name}?restype=container", headers=signed)
        return connection.getresponse().status in (201, 409)
    finally:
        connection.close()


def ceph_is_installed() -> bool:
    """Whether ``make servers`` or the system has Ceph's programs."""
    try:
        _ceph_programs()
    except NotInstalled:
        return False
    return True


def _ceph_programs() -> tuple[dict[str, str], Path]:
    """The environment they run in, and the folder of their libraries. Raises :class:`NotInstalled`."""
    prefix = _INSTALLED / "ceph" / "usr"
    if (prefix / "bin" / "radosgw").exists():
        libraries = next((prefix / "lib").glob("*-linux-gnu"))
        at = [libraries, libraries / "ceph", prefix.parent / "lib" / libraries.name]
        env = {
            **os.environ,
            "PATH": f"{prefix}/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(map(str, at)),
            "PYTHONPATH": f"{prefix}/lib/python3/dist-packages",
        }
        return env, libraries
    if all(shutil.which(name) for name in _CEPH_TOOLS):
        return dict(os.environ), next(Path("/usr/lib").glob("*-linux-gnu"))
    raise NotInstalled("Ceph is not installed: make servers, or apt-get install radosgw ceph-mon ceph-osd")


@contextmanager
def _ceph(folder: Path) -> Iterator[Running]:
    """Ceph's object gateway before a cluster of one monitor and one disk, which lies in memory."""
    env, libraries = _ceph_programs()
    monitor, old_monitor, gateway = (_free_port() for _ in range(3))
    cluster, disk = str(uuid.uuid4()), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    conf = {
        "fsid": cluster,
        "port": monitor,
        "old_port": old_monitor,
        "folder": folder,
        "libraries": libraries,
    }
    (folder / "ceph.conf").write_text(_CEPH_CONF.format(**conf))
    env["CEPH_CONF"] = str(folder / "ceph.conf")

    def tool(*command: str, timeout_s: float = _START_S) -> None:
        done = subprocess.run(
            command, env=env, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])

    monitors = f"[v2:127.0.0.1:{monitor},v1:127.0.0.1:{old_monitor}]"
    tool("monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitors, "monmap")
    tool("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap")
    # Its Python modules are those of the system's interpreter.
    ceph = ["/usr/bin/python3", shutil.which("ceph", path=env["PATH"]) or "ceph"]
    with ExitStack() as running:
        _start(running, ["ceph-mon", "-i", "a", "-f"], folder, env)
        tool(*ceph, "osd", "new", disk)
        tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        _start(running, ["ceph-osd", "-i", "0", "-f"], folder, env)
        front = f"beast endpoint=127.0.0.1:{gateway}"
        _start(running, ["radosgw", "-n", "client.rgw", "-f", "--rgw-frontends", front], folder, env)
        for user, key in (("owner", "AKID"), (_GUEST, "GUEST")):
            named = ("--uid", user, "--display-name", user, "--access-key", key, "--secret-key", SECRET)
            tool("radosgw-admin", "-n", "client.rgw", "user", "create", *named)
        found = _s3(f"http://127.0.0.1:{gateway}")
        _until(lambda: _listens(gateway), folder)
        as_owner(found.options["endpoint"]).create_bucket(Bucket=BUCKET)
        yield replace(found, guest="GUEST")


def as_owner(endpoint: str) -> Any:
    """boto3's client of an S3 server, for what obstore does not do."""
    import boto3

    keys = {"aws_access_key_id": "AKID", "aws_secret_access_key": SECRET}
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)


def allow_guest(running: Running, policy: dict[str, Any]) -> None:
    """Give the other user the rights of a policy of IAM's form, and no others."""
    statements = [
        {**one, "Principal": {"AWS": [f"arn:aws:iam:::user/{_GUEST}"]}} for one in policy["Statement"]
    ]
    content = json.dumps({**policy, "Statement": statements})
    as_owner(running.options["endpoint"]).put_bucket_policy(Bucket=BUCKET, Policy=content)


def _listens(port: int) -> bool:
    """Raises ``OSError`` if nothing does."""
    socket.create_connection(("127.0.0.1", port)).close()
    return True


#: By name: a context manager that runs it in a folder. Raises :class:`NotInstalled`.
SERVERS = {"moto": _moto, "azurite": _azurite, "ceph": _ceph}


def _s3(endpoint: str) -> Running:
    options = {"region": "us-east-1", "access_key_id": "AKID", "secret_access_key": SECRET}
    return Running(
        f"s3://{BUCKET}", {"endpoint": endpoint, **options, "client_options": {"allow_http": True}}
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _start(running: ExitStack, command: list[str], folder: Path, env: Any) -> None:
    """A process that ends with the block; what it says goes to a file of the folder."""
    log = running.enter_context((folder / f"{Path(command[0]).name}.out").open("wb"))
    program = shutil.which(command[0], path=env["PATH"]) or command[0]
    process = subprocess.Popen(
        [program, *command[1:]], env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT
    )

    def end() -> None:
        process.kill()
        process.wait()

    running.callback(end)


def _until(ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            if ready():
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            said = "\n".join(f"{file.name}: {file.read_text()[-1000:]}" for file in folder.glob("*.out"))
            raise RuntimeError(f"the server did not start:\n{said}")
        time.sleep(0.1)
