"""Runs of W&B, MLflow and ClearML, stored without a connection, read back and compared with metrics.json."""

import json
import logging
import struct
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import tiny

from fastamp.config import read_config
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.utils.errors import DataError
from fastamp.utils.trackers import ClearML, TrackedRun

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
REPORT = ("SOLVER.MAX_EPOCH", "2", "TEST.REPORT", "True", "TEST.EVAL_PERIOD", "1", "TEST.ROC", "True")
NAMED = ("TRACKING.PROJECT", "cities", "TRACKING.TAGS", "('night',)", "TRACKING.GROUP", "study")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Store the runs of all services in files."""
    for name, value in {
        "HOME": str(tmp_path),
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": f"{tmp_path}/clearml",
    }.items():
        monkeypatch.setenv(name, value)


class Stop(HookBase):
    """Hook that fails in the second epoch."""

    def after_step(self):
        if self.trainer.iter == 8:
            raise DataError("an image is missing")


def train(folder, service, *opts, resume=False, hook=None):
    trainer = DefaultTrainer(tiny.tiny_config(folder, "LOGGERS", service, *REPORT, *NAMED, *opts))
    if hook is not None:
        trainer.register_hooks([hook])
    trainer.resume_or_load(resume=resume)
    trainer.train()


def numbers(folder):
    """Return the numbers in metrics.json as (name, iteration, value)."""
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    return [
        (name, row["iteration"], value)
        for row in rows
        for name, value in row.items()
        if isinstance(value, int | float) and name != "iteration"
    ]


def expected_config(folder):
    cfg = read_config(folder / "config.yaml")
    return {key.path: value for key, value in cfg.keys_below()}


# Weights & Biases


def read_wandb(folder):
    """Read the records of an offline run, which are stored in the log format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    data, position, content, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        content += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            records.append(record)
            content = b""
    return records


def wandb_runs(folder):
    return [read_wandb(path) for path in sorted((folder / "tracking/wandb").glob("offline-run-*"))]


def wandb_history(records):
    found = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            names = [name for name in row if not name.startswith("_") and name != "iteration"]
            found += [(name, row["iteration"], row[name]) for name in names]
    return found


def test_wandb_stores_the_run(demo, tmp_path):
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    train(folder, "wandb")
    (records,) = wandb_runs(folder)
    assert sorted(wandb_history(records)) == sorted(numbers(folder)) and len(numbers(folder)) > 100
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, run.run_group, list(run.tags)) == ("cities", "run", "study", ["night"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {key: config[key] for key in config if key != "_wandb"} == json.loads(json.dumps(expected_config(folder)))
    exits = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    assert exits == [0] and json.loads((folder / "tracking/wandb.json").read_text()) == {"id": run.run_id}
    requests = [record.request.log_artifact.artifact for record in records if record.request.HasField("log_artifact")]
    artifacts = requests or [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    assert [(artifact.name.removeprefix(f"{run.run_id}-"), artifact.type) for artifact in artifacts] == [
        ("report", "report"),
        ("model_best", "model"),
        ("model_final", "model"),
    ]


def test_wandb_continues_a_failed_run(demo, tmp_path):
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    with pytest.raises(DataError):
        train(folder, "wandb", hook=Stop())
    train(folder, "wandb", resume=True)
    first, second = wandb_runs(folder)
    ids = [record.run.run_id for records in (first, second) for record in records if record.HasField("run")]
    assert len(set(ids)) == 1
    exits = [record.exit.exit_code for log in (first, second) for record in log if record.HasField("exit")]
    assert exits == [1, 0]
    assert {*wandb_history(first), *wandb_history(second)} >= {*numbers(folder)}


# MLflow


def mlflow_run(folder):
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient()
    return client, client.get_run(json.loads((folder / "tracking/mlflow.json").read_text())["id"])


def mlflow_metrics(client, run):
    history = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
    return [(metric.key, metric.step, metric.value) for metric in history]


def mlflow_name(name):
    return name.replace("@", "_").replace("=", "_")


def test_mlflow_stores_the_run(demo, tmp_path):
    folder = tmp_path / "run"
    train(folder, "mlflow")
    client, run = mlflow_run(folder)
    expected = sorted((mlflow_name(name), *rest) for name, *rest in numbers(folder))
    assert sorted(mlflow_metrics(client, run)) == expected
    assert any("TAR_FAR_" in name for name, *_ in expected)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert client.get_experiment(run.info.experiment_id).name == "cities"
    assert run.data.tags["group"] == "study" and run.data.tags["night"] == "true"
    assert run.data.params == {
        key: str(value) for key, value in json.loads(json.dumps(expected_config(folder))).items()
    }
    for name in ("report.html", "model_best.pth", "model_final.pth"):
        path = client.download_artifacts(run.info.run_id, name)
        assert Path(path).read_bytes() == (folder / name).read_bytes()


def test_mlflow_continues_a_failed_run_and_stores_each_iteration_once(demo, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(DataError):
        train(folder, "mlflow", hook=Stop())
    client, first = mlflow_run(folder)
    assert first.info.status == "FAILED" and len(client.search_runs([first.info.experiment_id])) == 1
    train(folder, "mlflow", resume=True)
    client, run = mlflow_run(folder)
    assert run.info.run_id == first.info.run_id and run.info.status == "FINISHED"
    found = [(name, step) for name, step, _ in mlflow_metrics(client, run)]
    assert sorted(found) == sorted((mlflow_name(name), step) for name, step, _ in numbers(folder))


def test_mlflow_without_a_usable_store_is_a_warning(demo, tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    train(tmp_path / "run", "mlflow")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if "MLFLOW_TRACKING_URI" in text and "mlflow:" in text]
    assert (tmp_path / "run/model_final.pth").exists()


# ClearML


def clearml_session(folder):
    task = json.loads((folder / "tracking/clearml.json").read_text())["id"]
    (session,) = [path for path in folder.parent.rglob(task) if (path / "task.json").exists()]
    content = json.loads((session / "task.json").read_text())
    lines = (session / "metrics.jsonl").read_text().splitlines()
    events = [event for line in lines for event in json.loads(line)]
    scalars = [
        ("/".join(dict.fromkeys((event["metric"], event["variant"]))), event["iter"], event["value"])
        for event in events
        if event["type"] == "training_stats_scalar" and not event["metric"].startswith(":")
    ]
    return content, scalars


def test_clearml_stores_the_run(demo, tmp_path):
    pytest.importorskip("clearml")
    folder = tmp_path / "run"
    train(folder, "clearml")
    content, scalars = clearml_session(folder)
    expected = [(name, step, pytest.approx(value)) for name, step, value in sorted(numbers(folder))]
    assert sorted(scalars) == expected
    assert content["project_name"] == "cities" and content["name"] == "run"
    assert sorted(content["tags"]) == ["group: study", "night"]
    config = {name: entry["value"] for name, entry in content["hyperparams"]["config"].items()}
    assert config.keys() == expected_config(folder).keys() and config["SOLVER.MAX_EPOCH"] == "2"
    names = [artifact["key"] for artifact in content["execution"]["artifacts"]]
    assert sorted(names) == ["model_best.pth", "model_final.pth", "report.html"]


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_clearml_task_has_the_status_of_the_run(tmp_path, monkeypatch, status):
    """A connection is required for the status: the calls are checked against the signatures of the package."""
    clearml = pytest.importorskip("clearml")
    Task = create_autospec(clearml.Task)
    task = Task.init.return_value = create_autospec(clearml.Task, instance=True)
    task.id = "abc"
    task.is_offline.return_value = Task.is_offline.return_value = False
    task.get_output_log_web_page.return_value = "https://app.clear.ml/abc"
    logger = task.get_logger.return_value = create_autospec(clearml.Logger, instance=True)
    monkeypatch.setattr(clearml, "Task", Task)
    tracker = ClearML()
    run = TrackedRun("cities", "run", "", [], {"SEED": 1}, str(tmp_path), run_id="abc")
    assert tracker.start(run) == ("abc", "https://app.clear.ml/abc")
    assert Task.init.call_args.kwargs["reuse_last_task_id"] == "abc"
    assert Task.init.call_args.kwargs["continue_last_task"] == 0
    assert Task.init.call_args.kwargs["continue_last_task"] is not False
    tracker.log(3, {"Demo/mAP": 50.0, "lr": 0.1})
    assert [call.args for call in logger.report_scalar.call_args_list] == [("Demo", "mAP", 50.0), ("lr", "lr", 0.1)]
    tracker.log_file(tmp_path / "report.html")
    tracker.finish(status)
    assert task.close.called == (status == "finished")
    assert task.mark_failed.called == (status == "failed")
    assert task.mark_stopped.called == (status == "interrupted")
    assert task.flush.called == (status != "finished")
