"""What ranks run in test_local_hosts.py: Accelerate and the Trainer on hosts with disks of their own. ``places[rank]``: the rank's host."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

import shardwise as sw
from tests.harness.errors import error_of
from tests.harness.logged import warnings_logged
from tests.harness.versions import lacking
from tests.integrations._accelerate_fns import launched
from tests.integrations._failing_saves_fns import _Script
from tests.integrations._trainer_fns import config_of, history, stop_at
from tests.integrations._trainer_parts import Rows, arguments, tokenizer

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained


def root(hosts: str, places: Sequence[int]) -> str:
    return os.path.join(hosts, f"host-{places[dist.get_rank()]}", "run")


def leads(places: Sequence[int]) -> bool:
    """Whether this rank is the first of its host."""
    return places.index(places[dist.get_rank()]) == dist.get_rank()


def cut(path: str) -> None:
    """Leave the last rank's part as a crash between the renames does. Collective."""
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        folder, name = os.path.split(path)
        os.rename(path, f"{folder}/.tmp-{name}-{'ab' * 8}")
    dist.barrier()


def temporary_in(folder: str) -> list[str]:
    return [n for n in os.listdir(folder) if n.startswith(".tmp")]


# -------------------------------------------------------------------------------------------- Accelerate


def accelerate(hosts: str, places: Sequence[int], automatic: bool) -> dict[str, Any]:
    """Five steps, with saves of the first three; the next life goes on from step 3. Then one host loses its newest folder."""
    at, found = root(hosts, places), dict[str, Any](losses=[], paths=[])
    with launched():
        script = _Script(at, automatic=automatic, local=True)
        for step in range(1, 6):
            found["losses"].append(script.train())
            if step <= 3:
                found["paths"].append(script.save().path)
        found["taken"] = error_of(
            lambda: script.accelerator.save_state(f"{at}/step-3") if not automatic else None
        )
    with launched():
        script = _Script(at, automatic=automatic, local=True)
        report = script.resume()
        found["resumed"] = report.step, report.path, report.exact
        found["after"] = [script.train(), script.train()]
    dist.barrier()
    if leads(places) and places[dist.get_rank()] == max(places):
        shutil.rmtree(found["paths"][-1])
    dist.barrier()
    with launched(), warnings_logged() as warned:
        script = _Script(at, automatic=automatic, local=True)
        report = script.resume()
        found["torn"] = report.step, report.path
        found["again"] = [script.train()]
        found["saved again"] = script.save().path
        found["warned"] = [text for text in warned if "files are missing on" in text or "killed" in text]
        found["digest"] = str(sw.digest(script.model))
        script = _Script(at, automatic=automatic, local=True)
        found["newest"] = script.resume().step
    return found


def accelerate_elsewhere(hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """The newest folder on other ranks and hosts; then with a host away; then what is refused."""
    at, found = root(hosts, places), dict[str, Any]()
    with launched():
        script = _Script(at, local=True)
        report = script.resume()
        found["resumed"] = report.step, str(sw.digest(script.model))
        found["left"] = [n for n in os.listdir(at) if n.startswith(".tmp")]
        alone = [0] * len(places)
        found["away"] = error_of(lambda: _Script(root(hosts, alone), local=True).resume())
        found["fallback"] = error_of(
            lambda: _Script(at, local=True, failures=sw.FailurePolicy(fallback=f"{at}-else"))
        )
        found["url"] = error_of(lambda: script.accelerator.save_state("s3://bucket/a"))
        found["nothing"] = error_of(lambda: script.accelerator.load_state(f"{at}/no-such"))
        found["none below"] = script.accelerator.newest_checkpoint(f"{at}-none")
    return found


def accelerate_cut(hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """The first save is cut between the renames; then one is saved of which an earlier attempt is left."""
    at, found = root(hosts, places), dict[str, Any]()
    with launched():
        script = _Script(at, local=True)
        script.train()
        first = script.save().path
    cut(first)
    with launched():
        script = _Script(at, local=True)
        report = script.resume()
        found["resumed"] = report.step, report.path
        for name in ("step-2", "other"):
            shutil.copytree(first, f"{at}/.tmp-{name}-{'cd' * 8}")
        script.train()
        script.save()
        found["left"] = temporary_in(at)
    return found


# ----------------------------------------------------------------------------------------------- Trainer


def life(
    path: str, output_dir: str, *, resume: Any = None, stop: int = 99, dropout: float = 0.2, **options: Any
) -> dict[str, Any]:
    """A life of twelve steps with a save at each third one, and an evaluation before it. What it came to."""
    metric = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    loaded = {"adapter": options.pop("adapter")} if "adapter" in options else {}
    given = metric | options.pop("arguments", {})
    with arguments(output_dir, **given) as args, warnings_logged() as warned:
        model = load_pretrained(args, path, config=config_of(path, dropout), **loaded)
        trainer = options.pop("kind", ShardwiseTrainer)(
            model,
            args,
            train_dataset=Rows(),
            eval_dataset=Rows(),
            processing_class=tokenizer(),
            callbacks=[stop_at(stop)],
            **options,
        )
        has = trainer.has_checkpoint()
        trainer.train(resume_from_checkpoint=resume)
    report = trainer.resume_report
    return {
        "has": has,
        "losses": history(trainer),
        "best": trainer.state.best_model_checkpoint,
        "digest": str(sw.digest(trainer.model)),
        "report": report and (report.step, report.exact, report.path, sorted(report.damaged)),
        "warned": list(warned),
        "names": sorted(n for n in os.listdir(output_dir) if not n.startswith(("_lock", ".place"))),
    }


def trainer(path: str, hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """A run without a stop on a shared directory; then on own disks: stopped at 10, resumed, its newest lost on one host, resumed."""
    at = root(hosts, places)
    found = {"whole": life(path, os.path.join(hosts, "whole"))}
    found["first"] = life(path, at, stop=10, local=True)
    found["again"] = life(path, at, resume=True, local=True)
    dist.barrier()
    if leads(places) and places[dist.get_rank()] == max(places):
        shutil.rmtree(f"{at}/checkpoint-12")
    dist.barrier()
    found["torn"] = life(path, at, resume=True, local=True)
    return found


def trainer_first(path: str, hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """Stopped at 10."""
    found = {"whole": life(path, os.path.join(hosts, "whole"), dropout=0.0)}
    found["first"] = life(path, root(hosts, places), stop=10, local=True, dropout=0.0)
    return found


def trainer_elsewhere(path: str, hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """On other ranks, one of them on a new host; a named checkpoint; then what is refused."""
    at, found = root(hosts, places), dict[str, Any]()
    found["other"] = life(path, at, resume=True, local=True, dropout=0.0)
    found["named"] = life(path, at, resume=f"{at}/checkpoint-9", local=True, dropout=0.0, stop=10)
    alone = root(hosts, [0] * len(places))
    found["away"] = error_of(lambda: life(path, alone, resume=f"{alone}/checkpoint-9", local=True))
    found["url"] = error_of(lambda: life(path, at, checkpoint_root="s3://bucket/a", local=True))
    found["fallback"] = error_of(
        lambda: life(path, at, failures=sw.FailurePolicy(fallback=f"{at}-else"), local=True)
    )
    return found


def trainer_cut(path: str, hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """The first save is cut between the renames. The next life runs out of memory, and of its saves the first does not appear everywhere."""

    class OutOfMemory(ShardwiseTrainer):
        """Its first step fails."""

        has_failed = False

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    at = root(hosts, places)
    life(path, at, stop=4, local=True, arguments={"fsdp": False})
    cut(f"{at}/checkpoint-3")
    rename = os.rename

    def failing(source: str, target: str) -> None:
        if dist.get_rank() == dist.get_world_size() - 1 and target.endswith("/checkpoint-6"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), target)
        rename(source, target)

    os.rename = failing
    try:
        given = {"fsdp": False, "auto_find_batch_size": True, "save_total_limit": None}
        rest = {"kind": OutOfMemory, "failures": sw.FailurePolicy()}
        return life(path, at, resume=True, stop=10, local=True, arguments=given, **rest)
    finally:
        os.rename = rename


def trainer_best(path: str, hosts: str, places: Sequence[int]) -> dict[str, Any]:
    """``load_best_model_at_end`` with adapters; of a metric that falls the first is the best, and stays alone at the end."""
    from peft import LoraConfig

    short = {
        "max_steps": 3,
        "save_steps": 1,
        "eval_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    found = life(path, root(hosts, places), local=True, arguments=short, adapter=adapter)
    found["shared"] = life(path, os.path.join(hosts, "shared"), arguments=short, adapter=adapter)
    return found
