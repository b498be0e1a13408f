"""What the ranks of test_integrations.py run: Accelerate and the HF Trainer with checkpoints in a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.integrations import accelerate as swa
from tests.harness.object_store import use_store
from tests.harness.versions import lacking
from tests.integrations._accelerate_fns import accelerator_with
from tests.integrations._accelerate_fns import whole as whole_model
from tests.integrations._accelerate_folders_fns import LINES, _prepared
from tests.integrations._trainer_fns import life, whole
from tests.integrations._trainer_parts import Rows, arguments

if lacking("trainer") is None:
    from shardwise.integrations.trainer import ShardwiseTrainer, load_pretrained


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ShardwiseError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def accelerate(endpoint: str, root: str, folder: str) -> dict[str, Any]:
    """Saved to a URL, changed, loaded; the URL is refused from then on. Automatic naming stays local."""
    from accelerate.utils import ProjectConfiguration

    use_store(endpoint)
    found: dict[str, Any] = {}
    with accelerator_with(plugin=LINES) as accelerator:
        model = _prepared(accelerator)
        found["path"] = swa.save_state(accelerator, f"{root}/state", step=3).path
        saved = whole_model(model)
        found["taken"] = _error_of(lambda: swa.save_state(accelerator, f"{root}/state"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        report = swa.load_state(accelerator, f"{root}/state/")
        found["report"] = report.step, report.exact
        found["same"] = all(torch.equal(saved[n], t) for n, t in whole_model(model).items())
        found["nowhere"] = _error_of(lambda: swa.load_state(accelerator, f"{root}/other"))
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    with accelerator_with(plugin=LINES, project_config=project) as accelerator:
        _prepared(accelerator)
        found["automatic"] = swa.save_state(accelerator, f"{root}/ignored").path
    return found


def best(hub: str, endpoint: str, root: str, folder: str) -> dict[str, Any]:
    """The best by a metric that falls is the first; rotation spares it, it is loaded at the end, and a resume knows it."""
    from transformers import TrainerCallback

    use_store(endpoint)
    found: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            found.setdefault(f"at {state.global_step}", whole(model))

    def train(steps: int, limit: int, resume: Any) -> Any:
        with arguments(
            folder,
            max_steps=steps,
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            save_total_limit=limit,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            greater_is_better=True,
        ) as args:
            model = load_pretrained(args, hub)
            trainer = ShardwiseTrainer(
                model,
                args,
                train_dataset=Rows(),
                eval_dataset=Rows(),
                callbacks=[Look()],
                checkpoint_root=root,
            )
            found.setdefault("has", []).append(trainer.has_checkpoint())
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    found["nothing"] = _error_of(lambda: train(3, 2, True))
    trainer = train(3, 2, None)
    found["best"], found["loaded"] = trainer.state.best_model_checkpoint, whole(trainer.model)
    found["kept"] = sw.verify(found["best"]).ok
    trainer = train(4, 1, True)
    found["resumed"] = trainer.resume_report.step, trainer.resume_report.differences
    found["best again"] = trainer.state.best_model_checkpoint
    with arguments(root) as args:
        found["output_dir"] = _error_of(lambda: ShardwiseTrainer(trainer.model, args, train_dataset=Rows()))
    return found


def killed(hub: str, endpoint: str, root: str, folder: str) -> None:
    """A life that is killed from outside while it saves."""
    use_store(endpoint)
    with arguments(folder) as args:
        life(hub, args, checkpoint_root=root)


def resumed(
    hub: str, endpoint: str, root: str, folder: str, resume: Any, dropout: float = 0.2
) -> dict[str, Any]:
    """The run that never stopped, locally; and the rest of the one that was killed."""
    use_store(endpoint)
    found: dict[str, Any] = {}
    with arguments(f"{folder}/whole") as args:
        trainer, found["whole"] = life(hub, args, dropout=dropout)
        found["after"] = whole(trainer.model)
    with arguments(f"{folder}/run", seed=7, data_seed=42) as args:
        trainer, found["resumed"] = life(hub, args, resume=resume, dropout=dropout, checkpoint_root=root)
        found["resumed after"] = whole(trainer.model)
        report = trainer.resume_report
        found["report"] = report.step, report.exact, report.differences, sorted(report.damaged)
        trainer.save_model()
    return found
