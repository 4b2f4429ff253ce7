"""MLflow."""

import re
import time
from pathlib import Path

from fastamp.utils.trackers.base import LOGGER_REGISTRY, TrackedRun, Tracker

# Limits of MLflow's servers.
_BATCH = 100
_MAX_LENGTH = 6000
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


@LOGGER_REGISTRY.register("mlflow")
class MLflow(Tracker):
    """Runs of MLflow (https://mlflow.org), in the store that MLFLOW_TRACKING_URI names.

    Characters that MLflow does not allow in names of metrics, e.g. "@" and "=", become "_".
    """

    name = "mlflow"
    package = "mlflow"
    install = 'pip install "fastamp[mlflow]"'
    fix = (
        "set MLFLOW_TRACKING_URI to the address of a server, e.g. http://localhost:5000; for local files, set "
        "MLFLOW_TRACKING_URI=file:./mlruns and MLFLOW_ALLOW_FILE_STORE=true"
    )

    def start(self, run: TrackedRun) -> tuple[str, str]:
        import mlflow

        self._client = mlflow.MlflowClient()
        self._logged: dict[str, int] = {}
        if run.run_id:
            self._run_id = run.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            for name in self._client.get_run(self._run_id).data.metrics:
                self._logged[name] = max(record.step for record in self._client.get_metric_history(self._run_id, name))
        else:
            experiment = mlflow.set_experiment(run.project).experiment_id
            tags = {"group": run.group} if run.group else {}
            tags |= dict.fromkeys(run.tags, "true")
            self._run_id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = [mlflow.entities.Param(key, str(value)[:_MAX_LENGTH]) for key, value in run.config.items()]
            for first in range(0, len(params), _BATCH):
                self._client.log_batch(self._run_id, params=params[first : first + _BATCH])
        return self._run_id, mlflow.get_tracking_uri()

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = {re.sub(r"[^/\w.\- :]", "_", name): value for name, value in metrics.items()}
        rows = [
            Metric(name, value, now, iteration)
            for name, value in values.items()
            if iteration > self._logged.get(name, -1)  # MLflow would keep both values of a repeated iteration
        ]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_file(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self, status: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS.get(status, "FAILED"))
