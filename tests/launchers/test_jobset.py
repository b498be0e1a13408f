"""examples/jobset.yaml: the published schema of JobSet takes it, and its parts fit each other.

``jobset-v0.12.0.json`` is a part of ``config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml`` of
https://github.com/kubernetes-sigs/jobset, tag v0.12.0 (Apache License 2.0): without descriptions, and without fields of pods that
the example does not use. It describes jobs and pods, too.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.process import ROOT

from ._schema import problems

SCHEMA = json.loads((Path(__file__).parent / "jobset-v0.12.0.json").read_text())
CLAIM, JOBSET = yaml.safe_load_all((ROOT / "examples" / "jobset.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]
POD = JOB["template"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_published_schema_takes_it() -> None:
    assert problems(JOBSET, SCHEMA) == []
    claims = SCHEMA["properties"]["spec"]["properties"]["volumeClaimPolicies"]["items"]["properties"][
        "templates"
    ]["items"]
    assert problems(CLAIM, claims) == []


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("spec", "failurePolicy", "rules", 0, "action"), "Restart", "none of"),
        (("spec", "failurePolicy", "maxRestart"), 3, "no such field"),
        (("spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), "0", "no integer"),
        (
            ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "name"),
            None,
            "no string",
        ),
        (
            ("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "gracePeriod"),
            1,
            "no such field",
        ),
        (("spec", "ttlSecondsAfterFinished"), -1, "less than"),
    ],
)
def test_the_schema_refuses(place: tuple[Any, ...], value: Any, said: str) -> None:
    wrong = copy.deepcopy(JOBSET)
    at = wrong
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = value
    (problem,) = problems(wrong, SCHEMA)
    assert said in problem


def test_there_is_time_to_save() -> None:
    arguments = CONTAINER["args"]
    deadline_s = float(arguments[arguments.index("--deadline-s") + 1])
    assert deadline_s + 5 <= POD["terminationGracePeriodSeconds"]
    assert CONTAINER["command"][0] == "python", "no shell between SIGTERM and the training"


def test_a_stop_restarts_all_without_a_count() -> None:
    from shardwise import PreemptionPolicy

    spec = JOB["template"]["spec"]
    codes, disrupted = spec["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"]["values"] == [PreemptionPolicy().exit_status]
    assert codes["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert POD["restartPolicy"] == "Never"
    assert spec["backoffLimit"] == 0
    (rule,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == (
        "RestartJobSetAndIgnoreMaxRestarts",
        ["PodFailurePolicy"],
    )


def test_ranks_find_each_other() -> None:
    env = {one["name"]: one.get("value") for one in CONTAINER["env"]}
    name = JOBSET["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-{JOB['name']}-0-0.{name}"
    spec = JOB["template"]["spec"]
    assert int(env["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"
    assert "RANK" in env
    assert {m["name"] for m in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["volumes"]}
    assert POD["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
