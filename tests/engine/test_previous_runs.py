"""A second training run in one OUTPUT_DIR moves the files of the first to previous-<n>; a resume does not."""

import itertools
import json
import os
from pathlib import Path

import pytest
import tiny

from fastamp.cli import main
from fastamp.engine import DefaultTrainer
from fastamp.engine.previous_runs import move_earlier_run
from fastamp.utils.errors import ConfigError, WriteError

CHECKPOINTS = {"model_best.pth", "model_final.pth", "model_0000.pth"}


def train(folder, *opts):
    options = tiny.tiny_options(folder, "SOLVER.MAX_EPOCH", "2", "TEST.REPORT", "True", *opts)
    assert main(["train", *options]) == 0


def names(folder):
    return {path.name for path in folder.iterdir()}


def events(folder):
    return [path.name for path in folder.glob("events.out.tfevents.*")]


def losses(folder):
    rows = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    return [(row["iteration"], row.get("total_loss")) for row in rows]


@pytest.mark.integration
def test_second_run_does_not_mix_with_the_first(demo, tmp_path):
    (tmp_path / "notes.txt").write_text("of the user")
    train(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    train(tmp_path, "SOLVER.BASE_LR", "1e-2", "SEED", "7")
    previous = tmp_path / "previous-1"
    moved = {path.name: path.read_bytes() for path in previous.iterdir() if path.is_file()}
    assert moved == {name: content for name, content in first.items() if name != "notes.txt"}
    assert CHECKPOINTS | {"metrics.json", "log.txt", "config.yaml", "report.html", "last_checkpoint"} <= moved.keys()
    assert CHECKPOINTS | {"notes.txt", "metrics.json", "report.html", "last_checkpoint"} <= names(tmp_path)
    assert len(events(tmp_path)) == len(events(previous)) == 1 and events(tmp_path) != events(previous)
    assert losses(tmp_path) != losses(previous)
    log = (tmp_path / "log.txt").read_text()
    assert log.count("environment:") == 1 and "SEED: 7" in log and "previous-1" in log
    assert "training finished" in log and "previous-1" not in (previous / "log.txt").read_text()
    train(tmp_path)
    assert "SEED: 7" in (tmp_path / "previous-2/log.txt").read_text()
    assert losses(tmp_path) == losses(previous)
    # The earlier run can be resumed where it is.
    assert main(["train", "--resume", *tiny.tiny_options(previous, "SOLVER.MAX_EPOCH", "3")]) == 0
    assert "training 3 epochs of 6 iterations, from iteration 13 of 18" in (previous / "log.txt").read_text()


@pytest.mark.integration
def test_resume_and_evaluation_keep_all_files(demo, tmp_path):
    train(tmp_path)
    before = losses(tmp_path)
    options = tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "3")
    assert main(["train", "--resume", *options]) == 0
    assert losses(tmp_path)[: len(before)] == before and not (tmp_path / "previous-1").exists()
    assert (tmp_path / "log.txt").read_text().count("environment:") == 2
    assert main(["eval", *options, "MODEL.WEIGHTS", str(tmp_path / "model_best.pth")]) == 0
    assert not (tmp_path / "previous-1").exists()


@pytest.mark.integration
def test_results_of_the_earlier_weights_are_moved(demo, tmp_path):
    """Files of fastamp eval, visualize and strip belong to the checkpoints that they were computed from."""
    train(tmp_path)
    best = str(tmp_path / "model_best.pth")
    options = tiny.tiny_options(tmp_path, "TEST.REPORT", "True", "TEST.PER_QUERY", "True", "MODEL.WEIGHTS", best)
    assert main(["eval", *options]) == 0
    assert main(["visualize", best, "--kind", "curves"]) == 0
    assert main(["strip", best]) == 0
    results = {"metrics_eval.json", "report_eval.html", "evaluation", "pictures", "model_best_stripped.pth"}
    assert results <= names(tmp_path)
    queries = [path.relative_to(tmp_path) for path in tmp_path.rglob("queries.csv")]
    earlier = {path: (tmp_path / path).read_bytes() for path in queries}
    train(tmp_path, "TEST.REPORT", "False")
    assert results <= names(tmp_path / "previous-1")
    assert not (results - {"evaluation"}) & names(tmp_path)
    assert queries and {path: (tmp_path / "previous-1" / path).read_bytes() for path in queries} == earlier


@pytest.mark.integration
def test_run_that_was_killed_before_its_first_checkpoint_is_moved(demo, tmp_path):
    train(tmp_path)
    for path in (*tmp_path.glob("*.pth"), tmp_path / "last_checkpoint"):
        path.unlink()
    train(tmp_path)
    assert {"metrics.json", "log.txt"} <= names(tmp_path / "previous-1")


@pytest.mark.integration
@pytest.mark.parametrize("spelling", ["../out", "../work/../out", "link"])
def test_log_is_divided_for_each_spelling_of_the_folder(demo, tmp_path, monkeypatch, spelling):
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "work/link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "work")
    for seed in ("1", "2"):
        train(spelling, "SOLVER.MAX_EPOCH", "1", "SEED", seed)
    for folder, seed in ((tmp_path / "out/previous-1", "1"), (tmp_path / "out", "2")):
        log = (folder / "log.txt").read_text()
        assert log.count("training finished") == 1 and f"SEED: {seed}" in log


@pytest.mark.integration
def test_trainers_in_one_process_write_separate_logs(demo, tmp_path):
    """Without default_setup, each training opens its own log.txt."""
    for seed in ("1", "2"):
        DefaultTrainer(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "1", "SEED", seed)).train()
    for folder in (tmp_path, tmp_path / "previous-1"):
        assert (folder / "log.txt").read_text().count("training 1 epoch of") == 1


@pytest.mark.integration
def test_link_with_the_name_of_the_new_folder_is_not_followed(demo, tmp_path):
    train(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/previous-1").symlink_to(tmp_path / "elsewhere")
    train(tmp_path / "run")
    assert names(tmp_path / "elsewhere") == set() and "metrics.json" in names(tmp_path / "run/previous-2")


def test_files_that_an_interrupted_move_left_are_moved_by_the_next_run(tmp_path, monkeypatch):
    rename = Path.rename
    files = {*CHECKPOINTS, "metrics.json", "metrics_eval.json", "last_checkpoint", "config.yaml", "log.txt"}
    for position in range(len(files)):
        folder = tmp_path / str(position)
        folder.mkdir()
        for name in files:
            (folder / name).write_text("of the earlier run")
        done = itertools.count()

        def fail(path, target, done=done, position=position):
            if next(done) == position:
                raise OSError("interrupted")
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail)
            with pytest.raises(WriteError):
                move_earlier_run(folder)
        assert (folder / "metrics.json").exists()
        assert files <= names(folder) or not (folder / "last_checkpoint").exists()  # it would name a moved file
        assert move_earlier_run(folder) == folder / "previous-2"
        assert names(folder) == {"previous-1", "previous-2"}
        assert names(folder / "previous-1") | names(folder / "previous-2") == files


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_read_only_output_dir_is_a_user_error(demo, tmp_path):
    tiny.train(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConfigError, match=str(tmp_path)):
            tiny.train(tmp_path)
    finally:
        tmp_path.chmod(0o700)
