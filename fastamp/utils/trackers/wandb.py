"""Weights & Biases."""

import os
from pathlib import Path

from fastamp.utils.trackers.base import LOGGER_REGISTRY, TrackedRun, Tracker


@LOGGER_REGISTRY.register("wandb")
class WandB(Tracker):
    """Runs of Weights & Biases (https://docs.wandb.ai). The environment variables of wandb apply, e.g. WANDB_MODE."""

    name = "wandb"
    package = "wandb"
    install = 'pip install "fastamp[wandb]"'
    fix = "run `wandb login`; without a connection, set WANDB_MODE=offline and upload the run later by `wandb sync`"

    def start(self, run: TrackedRun) -> tuple[str, str]:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            group=run.group or None,
            tags=run.tags or None,
            config=run.config,
            id=run.run_id or None,
            resume="allow" if run.run_id else None,
            dir=os.environ.get("WANDB_DIR", run.local_folder),
            # The utilization is that of the training process.
            settings=wandb.Settings(console="off", x_stats_pid=os.getppid()),
        )
        # wandb's own step must increase, but a resumed run repeats iterations.
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        return self._run.id, self._run.url or str(Path(self._run.dir).parent)

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        self._run.log({"iteration": iteration, **metrics})

    def log_file(self, path: Path) -> None:
        import wandb

        kind = "model" if path.suffix == ".pth" else path.stem
        artifact = wandb.Artifact(f"{self._run.id}-{path.stem}", type=kind)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        # Exit code 255 is shown as "killed".
        self._run.finish(exit_code={"finished": 0, "interrupted": 255}.get(status, 1))
