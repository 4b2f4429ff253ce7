"""Command `fastamp train --dry-run`: the report, the cleanup, and the same errors as in training."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tiny
import torch

from fastamp.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dry_run(demo, tmp_path, monkeypatch, capfd):
    """Function that dry-runs the tiny config, checks that no file changed, and returns exit code, stdout and stderr."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def run(*opts, output=tmp_path / "run", flags=()):
        before = content(Path(output))
        code = main(["train", "--dry-run", *flags, *tiny.tiny_options(output, *map(str, opts))])
        out, err = capfd.readouterr()
        assert not list(scratch.iterdir()) and content(Path(output)) == before
        return code, out, err

    return run


def content(folder):
    """Return a dict of path -> bytes for all files in a folder; None if the folder does not exist."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} if folder.is_dir() else None


def rows(out):
    """Parse the report, which is the last table in the output, into a dict of row name -> text."""
    lines = [line for line in out[out.index("| dry run") :].splitlines() if line.startswith("|")][2:]
    return dict([cell.strip() for cell in line.strip("|").split("|")] for line in lines)


def test_dry_run_reports_model_size_time_and_memory(dry_run, tmp_path):
    code, out, err = dry_run("SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True", "TEST.IMS_PER_BATCH", "4")
    assert code == 0, err
    report = rows(out)
    assert report["precision"].startswith("bf16 on cpu")
    # two convolutions, their norms, the neck with a frozen bias, and 16 classes x 16 features
    assert report["parameters"] == "3,856, of which 3,840 trainable"
    # (5 x 5 x 3 + 3 x 3 x 16 / 4) x 16 channels x 16 x 8 positions
    assert report["multiply-adds"] == f"{(75 * 128 + 144 * 32) * 16 / 1e9:.3g} G per image, in evaluation"
    assert "pre-flight passed" in out and "images/s" in report["training"] and "warm-up" in report["training"]
    assert report["evaluation on Demo"].startswith("8 of 30 images, 2 of 8 queries; ")
    assert "MiB" in report["memory"]
    assert ": 24 iterations " in report["total"] and ", 2 evaluations " in report["total"]
    assert "3 by SOLVER.CHECKPOINT_PERIOD, the best and the last" in report["checkpoints"]
    assert not (tmp_path / "run").exists()


def test_dry_run_supports_accumulation_swa_precise_bn_and_freezing(dry_run):
    options = ("SOLVER.ACCUM_STEPS", "2", "SOLVER.SWA.ENABLED", "True", "TEST.PRECISE_BN.ENABLED", "True")
    options += ("TEST.PRECISE_BN.DATASET", "Demo", "TEST.FLIP", "True", "TEST.RERANK", "on", "TEST.ROC", "on")
    options += ("MODEL.FREEZE_LAYERS", "backbone", "SOLVER.FREEZE_ITERS", "5", "TEST.PER_QUERY", "True")
    code, out, err = dry_run(*options)
    assert code == 0, err
    report = rows(out)
    assert ": 12 iterations " in report["total"] and "precise batch norm" in report["total"]
    assert "MODEL.FREEZE_LAYERS" in report["training"]


def test_dry_run_lists_events_that_the_run_does_not_reach(dry_run):
    code, out, err = dry_run("SOLVER.WARMUP_ITERS", "1000")
    assert code == 0, err
    assert "SOLVER.WARMUP_ITERS 1000" in rows(out)["not reached"]
    assert "not reached" not in rows(dry_run()[1])


def test_dry_run_of_a_single_iteration_reports_no_warmup(dry_run):
    code, out, err = dry_run("SOLVER.MAX_EPOCH", "1", "SOLVER.IMS_PER_BATCH", "64", "SOLVER.STEPS", "()")
    assert code == 0, err
    assert "warm-up" not in rows(out)["training"] and ": 1 iterations" in rows(out)["total"]


def test_dry_run_resumes_an_existing_run_without_changing_it(dry_run, run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "run")
    options = ("SOLVER.AMP", "bf16")
    assert ": 24 iterations " in rows(dry_run(*options)[1])["total"]
    code, out, err = dry_run(*options, flags=["--resume"])
    assert code == 0, err
    assert "resuming from" in out and ": 18 iterations " in rows(out)["total"]
    report = rows(dry_run(*options, "SOLVER.MAX_EPOCH", "1", flags=["--resume"])[1])
    assert report["total"].startswith("the training is complete") and "training" not in report


@pytest.mark.parametrize("folder, name", [("bounding_box_train", "Demo"), ("query", "Demo"), ("", "Market1501")])
def test_dry_run_prints_same_error_as_training_for_invalid_data(
    dry_run, demo_root, tmp_path, monkeypatch, input_error, folder, name
):
    root = tmp_path / "datasets"
    shutil.copytree(demo_root, root)
    for path in root.glob(f"*/{folder}/*.jpg"):
        path.write_bytes(b"no image")
    monkeypatch.setenv("FASTAMP_DATASETS", str(root))
    options = ("SOLVER.MAX_EPOCH", "1", "DATASETS.NAMES", name)
    code, _, err = dry_run(*options)
    assert code == 2 and err.startswith("error: ")
    assert input_error(main, ["train", *tiny.tiny_options(tmp_path / "real", *options)]) == err


@pytest.mark.parametrize(
    "options, message",
    [
        (("OUTPUT_DIR", "/dev/null/x"), "OUTPUT_DIR '/dev/null/x'"),
        (("MODEL.WEIGHTS", "/nowhere.pth"), "/nowhere.pth"),
        (("SOLVER.OPT", "Adamm"), "SOLVER.OPT"),
    ],
)
def test_dry_run_exits_with_2_on_invalid_config_value(dry_run, options, message):
    code, _, err = dry_run(*options)
    assert code == 2 and message in err and "Traceback" not in err


def test_dry_run_exits_with_2_if_weights_are_not_finite(dry_run, tmp_path):
    torch.save({"model": {"backbone.0.weight": torch.full((16, 3, 5, 5), float("nan"))}}, tmp_path / "nan.pth")
    options = ("MODEL.WEIGHTS", tmp_path / "nan.pth", "MODEL.WEIGHTS_MIN_MATCH", "0")
    code, _, err = dry_run(*options)
    assert code == 2 and "pre-flight" in err
    assert "fastamp replay" not in err  # there is no crash dump to replay


def test_dry_run_rejects_eval_only_flag(dry_run):
    code, _, err = dry_run(flags=["--eval-only"])
    assert code == 2 and "--dry-run" in err and "--eval-only" in err


def test_dry_run_reports_untested_ranking_if_no_query_has_a_match(dry_run, demo_root, tmp_path):
    """The dry run ranks only a subset of the queries, and the only query in this subset has no match."""
    (folder,) = demo_root.iterdir()
    lines = ["path,pid,camid,split"]
    lines += [
        f"{path},{path.name[:4]},{path.name[6]},train" for path in sorted(folder.glob("bounding_box_train/*.jpg"))
    ]
    images = sorted(folder.glob("bounding_box_test/*.jpg"))[:4]
    items = [(9001, 1, "query"), (9002, 1, "query"), (9002, 2, "gallery"), (9003, 2, "gallery")]
    lines += [f"{image},{pid},{cam},{split}" for image, (pid, cam, split) in zip(images, items, strict=True)]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    name = f"csv:{tmp_path / 'own.csv'}"
    options = ("DATASETS.NAMES", name, "DATASETS.TESTS", name, "TEST.IMS_PER_BATCH", "1")
    code, out, err = dry_run(*options)
    assert code == 0, err
    assert "ranking was not tested" in rows(out)[f"evaluation on {name}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_dry_run_removes_temporary_files_and_restores_handler_after_signal(dry_run, monkeypatch, tmp_path, number):
    monkeypatch.setattr("fastamp.engine.dry_run._train", lambda trainer, stage: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stopped:
        dry_run()
    assert stopped.value.code == 128 + number and signal.getsignal(number) is before
    assert content(tmp_path / "scratch") == {} and not (tmp_path / "run").exists()


@pytest.mark.integration
def test_dry_run_with_two_processes_prints_one_report(demo_root, tmp_path):
    """`python -m fastamp` launches two processes; only rank 0 prints the report, and no folder is left behind."""
    (tmp_path / "scratch").mkdir()
    options = tiny.tiny_options(tmp_path / "run", "SOLVER.AMP", "bf16", "TEST.IMS_PER_BATCH", "8")
    command = [sys.executable, "-m", "fastamp", "train", "--dry-run", "--num-gpus", "2"]
    done = subprocess.run(
        [*command, "--plugin", "tests/helpers/tiny.py", *options],
        env={**os.environ, "FASTAMP_DATASETS": str(demo_root), "TMPDIR": str(tmp_path / "scratch")},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| dry run") == 1
    report = rows(done.stdout)
    assert report["evaluation on Demo"].startswith("16 of 30 images, 4 of 8 queries; ")
    assert "per process" in report["memory"]
    assert not (tmp_path / "run").exists() and not list((tmp_path / "scratch").glob("fastamp*"))
