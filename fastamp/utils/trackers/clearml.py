"""ClearML."""

from pathlib import Path
from typing import Any

from fastamp.utils.trackers.base import LOGGER_REGISTRY, TrackedRun, Tracker


@LOGGER_REGISTRY.register("clearml")
class ClearML(Tracker):
    """Tasks of ClearML (https://clear.ml). An offline session (CLEARML_OFFLINE_MODE=1) cannot be continued."""

    name = "clearml"
    package = "clearml"
    install = 'pip install "fastamp[clearml]"'
    fix = "run `clearml-init`; without a connection, set CLEARML_OFFLINE_MODE=1 and import the session later"

    def start(self, run: TrackedRun) -> tuple[str, str]:
        from clearml import Task

        previous = "" if run.run_id.startswith("offline-") else run.run_id
        task: Any = Task.init(
            project_name=run.project,
            task_name=run.name,
            tags=[*run.tags, *([f"group: {run.group}"] if run.group else [])],
            reuse_last_task_id=previous or False,
            continue_last_task=0 if previous else False,  # 0: the iterations of a resumed run need no offset
            # This process contains neither the training code nor its output.
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_connect_streams=False,
        )
        self._task = task
        task.connect(run.config, name="config")
        return task.id, str(task.get_offline_mode_folder() if Task.is_offline() else task.get_output_log_web_page())

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            logger.report_scalar(title or name, series, value, iteration=iteration)

    def log_file(self, path: Path) -> None:
        self._task.upload_artifact(path.name, artifact_object=str(path), wait_on_upload=True)

    def finish(self, status: str) -> None:
        if status == "finished" or self._task.is_offline():
            self._task.close()
            return
        self._task.flush(wait_for_uploads=True)
        if status == "failed":
            self._task.mark_failed(status_reason="training failed")
        else:
            self._task.mark_stopped()
