"""FastTune as a command: searches run to the end, on identities held out, and leave what train_net.py takes."""

import csv
import json
from pathlib import Path

import pytest
import tiny
import train_net
import tune_net

from fastamp.config import get_cfg

pytestmark = pytest.mark.tune

SPACE = """
lr: {loguniform: [1e-4, 1e-1]}
SOLVER.OPT: {choice: [Adam, SGD]}
SOLVER.WARMUP_ITERS: {quniform: [0, 4, 2]}
IDENTITIES: {randint: [2, 4]}
DATALOADER.NUM_INSTANCE: {choice: [2, 4]}
"""
# A module that is imported once, here and in each of Ray's processes.
PARTS = f"import sys\nsys.path.append({str(Path(tiny.__file__).parent.resolve())!r})\nimport tiny\n"


def run(tmp_path, capfd, *flags, opts=(), space=SPACE):
    (tmp_path / "space.yml").write_text(space)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "base.yml").write_text("SOLVER: {AMP: bf16}\n")
    output = tmp_path / "search"
    options = tiny.tiny_options(output, "SOLVER.MAX_EPOCH", "4", "TEST.EVAL_PERIOD", "1", *opts)
    code = tune_net.cli(
        [
            *("--config-file", str(tmp_path / "base.yml"), "--space", str(tmp_path / "space.yml")),
            *("--parts", str(tmp_path / "parts.py"), "--num-trials", "6", *flags, *options),
        ]
    )
    return code, output, capfd.readouterr()


def trials(output):
    with (output / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "flags",
    [
        ("--srch-algo", "hyperopt", "--scheduler", "asha"),
        ("--srch-algo", "optuna", "--scheduler", "asha"),
        ("--srch-algo", "optuna", "--scheduler", "hyperband"),
        ("--srch-algo", "random", "--scheduler", "none"),
    ],
)
def test_searches_run_to_the_end(demo, tmp_path, capfd, flags):
    code, output, captured = run(tmp_path, capfd, *flags)
    assert code == 0, captured.err
    rows = trials(output)
    assert len(rows) == 6 and all(row["failure"] == "" for row in rows)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True) and scores[0] > 0
    assert max(int(row["epochs"]) for row in rows) == 4
    assert "trial 6 of 6" in captured.err and "best so far" in captured.err and "left" in captured.err
    assert "| trial" in captured.out and "the winner" in captured.out
    assert (output / "trials.png").read_bytes()[1:4] == b"PNG"

    best = get_cfg()
    best.merge_from_file(str(output / "best_config.yaml"))
    assert float(rows[0]["SOLVER.BASE_LR"]) == best.SOLVER.BASE_LR
    assert int(rows[0]["IDENTITIES"]) * best.DATALOADER.NUM_INSTANCE == best.SOLVER.IMS_PER_BATCH
    assert best.DATASETS.NAMES == best.DATASETS.TESTS == ("Demo",) and best.SOLVER.AMP.DTYPE == "bfloat16"
    if flags[-1] == "none":
        capfd.readouterr()
        again = ["--config-file", str(output / "best_config.yaml"), "OUTPUT_DIR", str(tmp_path / "again")]
        assert train_net.cli(again) == 0
        rows = [json.loads(line) for line in (tmp_path / "again/metrics.json").read_text().splitlines()]
        assert rows[-1]["Demo/mAP"] > 0


def test_population_based_training_exploits_and_loses_none(demo, tmp_path, capfd):
    space = "{lr: {loguniform: [1e-5, 1e-1]}, MODEL.LOSSES.TRI.MARGIN: {quniform: [0.0, 0.6, 0.1]}}"
    code, output, captured = run(tmp_path, capfd, "--pbt", space=space)
    assert code == 0, captured.err
    rows = trials(output)
    assert len(rows) == 6 and all(row["failure"] == "" and int(row["epochs"]) == 4 for row in rows)
    assert list(output.glob("pbt_policy_*.txt")), "no trial went on from another"
    assert all(1e-5 <= float(row["SOLVER.BASE_LR"]) <= 1e-1 for row in rows)


@pytest.mark.parametrize(
    "flags, space, message",
    [
        (("--pbt",), "IDENTITIES: {randint: [2, 4]}", "IDENTITIES cannot change there"),
        (("--scheduler", "pbt"), "lr: {uniform: [0.1, 1.0]}", "--srch-algo hyperopt would have no part"),
        ((), "lr: {uniform: [-1, 1.0]}", "SOLVER.BASE_LR is -1.0"),
        (("--val-fraction", "0.99"), "lr: {uniform: [0.1, 1.0]}", "--val-fraction 0.99"),
    ],
)
def test_what_is_refused_before_any_trial(demo, tmp_path, capfd, flags, space, message):
    code, output, captured = run(tmp_path, capfd, *flags, space=space)
    assert code == 2 and message in captured.err and "Traceback" not in captured.err
    assert not list(output.glob("trial_*"))


def test_a_trial_that_fails_does_not_end_the_others(demo, tmp_path, capfd):
    space = "SOLVER.BASE_LR: {choice: [1e-2, 1e+30]}"
    code, output, captured = run(
        tmp_path, capfd, "--srch-algo", "random", "--scheduler", "none", space=space, opts=["SOLVER.WARMUP_ITERS", "0"]
    )
    rows = trials(output)
    assert code == 0 and len(rows) == 6
    failed = [row for row in rows if row["failure"]]
    assert 0 < len(failed) < 6 and all(float(row["SOLVER.BASE_LR"]) > 1 for row in failed)
    assert f"{len(failed)} of 6 trials failed" in captured.out and float(rows[0]["SOLVER.BASE_LR"]) == 1e-2


def test_when_all_fail_the_exit_code_says_so(demo, tmp_path, capfd):
    space = "SOLVER.BASE_LR: {choice: [1e+30]}"
    code, output, _ = run(
        tmp_path, capfd, "--srch-algo", "random", "--num-trials", "2", space=space, opts=["SOLVER.WARMUP_ITERS", "0"]
    )
    assert code == 1 and not (output / "best_config.yaml").exists() and len(trials(output)) == 2
