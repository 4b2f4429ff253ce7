"""Loggers of a training: TensorBoard, and experiment trackers that fail, hang or end."""

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import file_tracker
import preloaded
import pytest
import tiny
import torch
from file_tracker import read_calls

from fastamp.cli import main
from fastamp.config import get_cfg
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.engine.loggers import check_loggers, in_group, without_trackers
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.integration

HELPERS = Path(file_tracker.__file__).parent
TIMED = ("time", "data_time", "images_per_second", "eta_seconds", "peak_memory_mb")
FILE = ("LOGGERS", "file", "SOLVER.MAX_EPOCH", "2", "TRACKING.TIMEOUT", "30")


def run(folder, *opts, resume=False, hook=None):
    trainer = DefaultTrainer(tiny.tiny_config(folder, *opts))
    if hook is not None:
        trainer.register_hooks([hook])
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def logged(folder):
    return [content for method, content in read_calls(folder) if method == "log"]


def numbers(row):
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def tracker_warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "file" in record.message
    ]


def assert_same_run(first, second):
    one, two = (torch.load(folder / "model_final.pth", weights_only=True) for folder in (first, second))
    for part in ("model", "optimizer", "random"):
        flat = [torch.utils._pytree.tree_leaves(checkpoint[part]) for checkpoint in (one, two)]
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True)), (
            part
        )
    assert untimed(rows(first)) == untimed(rows(second))


def untimed(lines):
    return [{name: value for name, value in row.items() if name not in TIMED} for row in lines]


@pytest.fixture(scope="module")
def untracked(demo_root, tmp_path_factory):
    """Folder of a run without loggers."""
    folder = tmp_path_factory.mktemp("untracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        torch.manual_seed(0)
        run(folder, *FILE, "LOGGERS", "()")
    return folder


def test_tracker_receives_config_metrics_and_files(demo, tmp_path, untracked):
    run(tmp_path, *FILE, "TEST.REPORT", "True", "TRACKING.TAGS", "a", "TRACKING.PROJECT", "cities")
    calls = read_calls(tmp_path)
    assert [method for method, _ in calls if method != "log"] == ["start", *["log_file"] * 3, "finish"]
    start, *_, finish = calls
    assert start[1]["project"] == "cities" and start[1]["name"] == tmp_path.name and start[1]["tags"] == ["a"]
    assert start[1]["config"]["SOLVER.BASE_LR"] == 1e-3 and start[1]["config"]["DATASETS.TESTS"] == ["Demo"]
    assert finish[1] == "finished"
    assert logged(tmp_path) == [numbers(row) for row in rows(tmp_path)] and len(logged(tmp_path)) > 6
    files = {content["name"]: content["size"] for method, content in calls if method == "log_file"}
    assert files == {name: (tmp_path / name).stat().st_size for name in files}
    assert list(files) == ["report.html", "model_best.pth", "model_final.pth"]
    assert_same_run(tmp_path, untracked)


def test_resume_continues_the_same_run_and_a_new_run_does_not(demo, tmp_path):
    options = (*FILE, "SOLVER.MAX_EPOCH", "4")

    class Stop(HookBase):
        def after_step(self):
            if self.trainer.iter == 8:
                raise DataError("an image is missing")

    with pytest.raises(DataError):
        run(tmp_path, *options, hook=Stop())
    assert read_calls(tmp_path)[-1] == ("finish", "failed")
    run(tmp_path, *options, resume=True)
    calls = read_calls(tmp_path)
    first, second = (content["run_id"] for method, content in calls if method == "start")
    assert (first, second) == ("", "run0") and calls[-1] == ("finish", "finished")
    # Both parts together contain the lines of metrics.json.
    expected = untimed(map(numbers, rows(tmp_path)))
    assert {*map(json.dumps, untimed(logged(tmp_path)))} == {*map(json.dumps, expected)}
    run(tmp_path, *options)
    assert read_calls(tmp_path)[0][1]["run_id"] == "" and len(read_calls(tmp_path / "previous-1")) == len(calls)


@pytest.mark.parametrize(
    "fault",
    [
        "raise in start",
        "hang in start",
        "exit in start",
        "raise in log 5",
        "fill disk in log",
        "exit in log 5",
        "hang in log 5",
        "raise in log_file",
        "hang in finish",
        "sleep in log",
    ],
)
def test_failing_tracker_does_not_change_the_training(demo, tmp_path, untracked, caplog, fault):
    hangs = fault.startswith("hang")
    run(tmp_path, *FILE, "TRACKING.TAGS", f"('{fault}',)", "TRACKING.TIMEOUT", "2" if hangs else "30")
    assert_same_run(tmp_path, untracked)
    warnings = tracker_warnings(caplog)
    assert len(warnings) == (0 if fault.startswith("sleep") else 1), warnings
    if fault == "raise in log 5":  # the other lines are logged
        iterations = [row["iteration"] for row in rows(tmp_path)]
        assert [row["iteration"] for row in logged(tmp_path)] == [
            iteration for iteration in iterations if iteration != 5
        ]
        assert read_calls(tmp_path)[-1] == ("finish", "finished")


def test_tracker_with_an_unusable_folder(demo, tmp_path, untracked, caplog):
    (tmp_path / "tracking").write_text("a file")
    torch.manual_seed(0)
    run(tmp_path, *FILE)
    assert_same_run(tmp_path, untracked)
    assert len(tracker_warnings(caplog)) == 1


def test_missing_package_is_a_warning(demo, tmp_path, untracked, caplog):
    run(tmp_path, *FILE, "LOGGERS", "missing")
    assert_same_run(tmp_path, untracked)
    found = [record for record in caplog.records if "pip install nothing" in record.getMessage()]
    assert [record.levelname for record in found] == ["WARNING"]


def test_tensorboard_does_not_change_the_training(demo, tmp_path, untracked):
    run(tmp_path, *FILE, "LOGGERS", "tensorboard")
    assert_same_run(tmp_path, untracked)


def test_interrupted_run_uploads_no_files(demo, tmp_path):
    class Interrupt(HookBase):
        def before_step(self):
            if self.trainer.iter == 3:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        run(tmp_path, *FILE, hook=Interrupt())
    methods = [method for method, _ in read_calls(tmp_path)]
    assert read_calls(tmp_path)[-1] == ("finish", "interrupted") and "log_file" not in methods


def test_killed_run_is_marked_as_interrupted(demo, tmp_path):
    script = HELPERS / "killable_run.py"
    process = preloaded.run(script, tmp_path, "step", "LOGGERS", "file")
    assert process.returncode == -signal.SIGKILL, process.stderr
    deadline = time.monotonic() + 60
    while read_calls(tmp_path)[-1][0] != "finish" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert read_calls(tmp_path)[-1] == ("finish", "interrupted")
    assert logged(tmp_path) == [numbers(row) for row in rows(tmp_path)]


PLUGIN = """
from fastamp.utils.trackers import LOGGER_REGISTRY, Tracker


@LOGGER_REGISTRY.register("plugin_tracker")
class PluginTracker(Tracker):
    name, package = "plugin_tracker", "json"

    def start(self, run):
        self._file = open(run.local_folder / "lines.txt", "w")
        return "7", "here"

    def log(self, iteration, metrics):
        print(iteration, file=self._file, flush=True)

    def log_file(self, path):
        pass

    def finish(self, status):
        print(status, file=self._file, flush=True)
"""


def test_plugin_registers_a_tracker(demo, tmp_path, capsys):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    options = tiny.tiny_options(tmp_path / "run", *FILE, "LOGGERS", "plugin_tracker")
    assert main(["train", "--plugin", str(tmp_path / "plugin.py"), *options]) == 0
    lines = (tmp_path / "run/tracking/lines.txt").read_text().split()
    assert lines == [*(str(row["iteration"]) for row in rows(tmp_path / "run")), "finished"]


def test_seeds_are_one_group(demo, tmp_path):
    options = tiny.tiny_options(tmp_path / "study", *FILE, "SOLVER.MAX_EPOCH", "1")
    assert main(["train", "--seeds", "1", "2", *options]) == 0
    runs = [read_calls(tmp_path / f"study/seed{seed}")[0][1] for seed in (1, 2)]
    assert [run["name"] for run in runs] == ["study-seed1", "study-seed2"]
    assert [run["group"] for run in runs] == ["study"] * 2


def test_groups_and_configs_without_trackers():
    cfg = get_cfg()
    assert in_group(cfg, "a/study", "x") is cfg
    tracked = cfg.with_values({"LOGGERS": ("tensorboard", "file"), "TRACKING.GROUP": "g", "TRACKING.NAME": "n"})
    named = in_group(tracked, "a/study", "x")
    assert (named.TRACKING.GROUP, named.TRACKING.NAME) == ("g", "n-x")
    assert without_trackers(tracked).LOGGERS == ("tensorboard",) and tracked.LOGGERS == ("tensorboard", "file")


@pytest.mark.parametrize("key, value", [("LOGGERS", "tensorbord"), ("TRACKING.ARTIFACTS", "../secret")])
def test_unknown_names_are_errors(tmp_path, key, value):
    with pytest.raises(ConfigError, match=key):
        check_loggers(tiny.tiny_config(tmp_path, key, value))


def test_no_process_remains_and_no_service_is_imported(demo, tmp_path):
    trainer = run(tmp_path, *FILE, "LOGGERS", "('file', 'tensorboard', 'file')", "SOLVER.MAX_EPOCH", "1")
    assert trainer.writers == [] and len([m for m, _ in read_calls(tmp_path) if m == "start"]) == 1
    assert not {"wandb", "mlflow", "clearml"} & set(sys.modules) or os.environ.get("PYTEST_XDIST_WORKER") is not None
