"""Blocks for a shell that ask SLURM, AWS or git for something: run as they are, with a stand-in for what is on another machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from tests.docs.blocks import DOCS, ROOT, Block, blocks
from tests.docs.every_block import site
from tests.harness.object_store import s3_server

pytestmark = pytest.mark.slow

#: SLURM of one node and one task for each job.
SLURM = {
    "sbatch": 'exec bash "$@"',
    "srun": """while [[ $1 == --* ]]; do shift; done
export SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
exec "$@"
""",
    "scontrol": 'echo "scontrol $*"',
}


def block_of(page: str, words: str) -> Block:
    (found,) = (block for block in blocks(DOCS / page) if words in block.text)
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which SLURM's commands, this Python and the package are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in SLURM.items():
        file = folder / name
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "SLURM_JOB_ID": "42",
    }


def shell(text: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_a_job_of_slurm(tmp_path: Path, environment: dict[str, str]) -> None:
    """tests/launchers runs it under SLURM itself, and stops it there in each way that SLURM has."""
    command = block_of("howto/launchers.md", "sbatch").text.strip()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    status, said = shell(f"{command} --steps 3 --step-seconds 0", tmp_path, environment)
    assert status == 0, said
    losses = [json.loads(line) for line in (tmp_path / "runs/a/losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in losses if "step" in row] == [1, 2, 3]


@pytest.mark.parametrize(("status", "again"), [(0, False), (1, False), (75, True), (138, True), (143, True)])
def test_which_status_asks_slurm_for_the_job_again(
    tmp_path: Path, environment: dict[str, str], status: int, again: bool
) -> None:
    (tmp_path / "train.py").write_text(f"import sys\nsys.exit({status})\n")
    found, said = shell(block_of("howto/preemption.md", "scontrol requeue").text, tmp_path, environment)
    assert (found, said) == (status, "scontrol requeue 42\n" if again else "")


@pytest.mark.parametrize("words", ["pip install ./shardwise", "pip wheel"])
def test_install_from_a_clone(tmp_path: Path, environment: dict[str, str], words: str) -> None:
    """Without an index: what builds the wheel is installed, and what the package depends on."""
    clone, _ = block_of("install.md", "git clone").text.split("\n", 1)
    text = block_of("install.md", words).text
    text = text if clone in text else f"{clone}\n{text}"
    text = text.replace("$ ", "").replace("REPOSITORY", str(ROOT))
    # PIP_NO_BUILD_ISOLATION=0 means --no-build-isolation.
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_TARGET": "installed"}
    text = re.sub(r"^pip ", "python -m pip ", text, flags=re.MULTILINE)
    status, said = shell(f"set -e\n{text}", tmp_path, environment | pip)
    assert status == 0, said
    assert (tmp_path / "installed/shardwise/__init__.py").exists()


def test_the_lifecycle_rule(tmp_path: Path) -> None:
    """The call of ``aws``, by its Python library, to moto's server."""
    found = list(blocks(DOCS / "howto/stores/s3.md"))
    (command,) = (block.text for block in found if block.text.startswith("aws "))
    (rule,) = (
        block.text for block in found if "AbortIncompleteMultipartUpload" in block.text and block.language
    )
    words = shlex.split(command)
    assert words[:2] == ["aws", "s3api"]
    assert words[-1] == "file://lifecycle.json"
    options = dict(zip(words[3::2], words[4::2], strict=True))
    given = {"--bucket": options["--bucket"], "--lifecycle-configuration": json.loads(rule)}
    arguments = {"".join(w.title() for w in name.split("-")): value for name, value in given.items()}
    with s3_server(tmp_path) as server:
        server.call("PUT", f"/{options['--bucket']}")
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server.port}",
            region_name="us-east-1",
            aws_access_key_id="AKID",
            aws_secret_access_key="SECRET",
        )
        getattr(client, words[2].replace("-", "_"))(**arguments)
        (stored,) = client.get_bucket_lifecycle_configuration(Bucket=options["--bucket"])["Rules"]
    (asked,) = json.loads(rule)["Rules"]
    assert stored["AbortIncompleteMultipartUpload"] == asked["AbortIncompleteMultipartUpload"]
    assert stored["Status"] == "Enabled"


def test_targets_of_make_exist() -> None:
    """What each would run is for the tests that every_block.py names; some take an hour."""
    found = {
        match[1]
        for block, _ in site()
        for match in re.finditer(r"^(?:\$ )?make ([a-z-]+)", block.text, re.MULTILINE)
    }
    assert {"demo", "bench", "phases", "quick"} <= found
    done = subprocess.run(["make", "-n", *sorted(found)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
