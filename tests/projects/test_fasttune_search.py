"""FastTune as a command: searches run to the end, on identities held out, and leave what train_net.py takes."""

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
import train_net
import tune_net

from fastamp.config import get_cfg

pytestmark = pytest.mark.tune

SPACE = """
lr: {loguniform: [1e-4, 1e-1]}
SOLVER.OPT: {choice: [Adam, SGD]}
SOLVER.WARMUP_ITERS: {quniform: [0, 12, 4]}
IDENTITIES: {randint: [2, 4]}
DATALOADER.NUM_INSTANCE: {choice: [2, 4]}
"""
# A module that is imported once, here and in each of Ray's processes; and a part that breaks under one value.
PARTS = f"""
import sys
sys.path.append({str(Path(tiny.__file__).parent.resolve())!r})
import tiny
from fastamp.modeling import BACKBONE_REGISTRY

def build_fragile_backbone(cfg):
    if cfg.SOLVER.BASE_LR == 0.5:
        raise RuntimeError("this part is broken")
    return tiny.build_tiny_backbone(cfg)

if "build_fragile_backbone" not in BACKBONE_REGISTRY:
    BACKBONE_REGISTRY.register()(build_fragile_backbone)
"""
TUNE_NET = Path(tune_net.__file__).resolve()


def arguments(tmp_path, *flags, opts=(), space=SPACE):
    (tmp_path / "space.yml").write_text(space)
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "base.yml").write_text("SOLVER: {AMP: bf16}\n")
    options = tiny.tiny_options(tmp_path / "search", "SOLVER.MAX_EPOCH", "4", "TEST.EVAL_PERIOD", "1", *opts)
    return [
        *("--config-file", str(tmp_path / "base.yml"), "--space", str(tmp_path / "space.yml")),
        *("--parts", str(tmp_path / "parts.py"), "--num-trials", "6", *flags, *options),
    ]


def run(tmp_path, capfd, *flags, opts=(), space=SPACE):
    code = tune_net.cli(arguments(tmp_path, *flags, opts=opts, space=space))
    return code, tmp_path / "search", capfd.readouterr()


def trials(output):
    with (output / "trials.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "flags",
    [
        ("--srch-algo", "hyperopt", "--scheduler", "asha"),
        ("--srch-algo", "optuna", "--scheduler", "hyperband"),
        ("--srch-algo", "bohb"),
    ],
)
def test_searches_run_to_the_end(demo, tmp_path, capfd, flags):
    if "bohb" in flags:
        pytest.importorskip("hpbandster", reason="the extra bohb is not installed")
    code, output, captured = run(tmp_path, capfd, *flags)
    assert code == 0, captured.err
    rows = trials(output)
    assert len(rows) == 6 and all(row["failure"] == "" for row in rows)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True) and scores[0] > 0
    for row in rows:
        assert float(row["score"]) == pytest.approx((float(row["mAP"]) + float(row["Rank-1"])) / 2)
        assert float(row["images_per_second"]) > 0 and float(row["peak_memory_mb"]) > 0 and row["skipped_steps"]
    # Some were stopped, none before warm-up ends: 78 images make 6 batches of 12 at the fewest, 12 steps are 2 epochs.
    assert max(int(row["epochs"]) for row in rows) == 4 and min(int(row["epochs"]) for row in rows) == 2
    assert "trial 6 of 6" in captured.err and "best so far" in captured.err and "left" in captured.err
    assert "| stage" in captured.out and "the winner" in captured.out
    assert (output / "trials.png").read_bytes()[1:4] == b"PNG"

    best = get_cfg()
    best.merge_from_file(str(output / "best_config.yaml"))
    assert float(rows[0]["SOLVER.BASE_LR"]) == best.SOLVER.BASE_LR
    assert int(rows[0]["IDENTITIES"]) * best.DATALOADER.NUM_INSTANCE == best.SOLVER.IMS_PER_BATCH
    assert best.DATASETS.NAMES == best.DATASETS.TESTS == ("Demo",) and best.SOLVER.AMP.DTYPE == "bfloat16"

    if "asha" not in flags:  # as if it had been killed
        (output / "search/outcomes.json").unlink()
        code, _, captured = run(tmp_path, capfd, *flags, "--resume")
        assert code == 2 and "cannot be resumed" in captured.err


def test_a_trial_that_fails_or_crashes_does_not_end_the_others(demo, tmp_path, capfd):
    space = "SOLVER.BASE_LR: {choice: [1e-2, 1e+30, 0.5]}"
    options = ["SOLVER.WARMUP_ITERS", "0", "MODEL.BACKBONE.NAME", "build_fragile_backbone"]
    # With this seed two trials are good, one breaks and one fails.
    flags = ["--srch-algo", "random", "--scheduler", "none", "--seed", "11", "--num-trials", "4"]
    code, output, captured = run(tmp_path, capfd, *flags, space=space, opts=options)
    assert code == 0, captured.err
    rows = trials(output)
    kinds = Counter(
        "good" if not row["failure"] else "crash" if "this part is broken" in row["failure"] else "failure"
        for row in rows
    )
    assert kinds == {"good": 2, "crash": 1, "failure": 1}
    assert "2 of 4 trials failed" in captured.out
    good = [row for row in rows if not row["failure"]]
    assert rows[: len(good)] == good  # those that failed are the worst
    # Trials of the same values are the same training, whatever failed beside them.
    assert len({row["score"] for row in good}) == 1 and {row["SOLVER.BASE_LR"] for row in good} == {"0.01"}

    again = ["--parts", str(tmp_path / "parts.py"), "--config-file", str(output / "best_config.yaml")]
    assert train_net.cli([*again, "OUTPUT_DIR", str(tmp_path / "again")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "again/metrics.json").read_text().splitlines()]
    assert rows[-1]["Demo/mAP"] > 0


def test_when_all_fail_the_exit_code_says_so(demo, tmp_path, capfd):
    space = "SOLVER.BASE_LR: {choice: [1e+30]}"
    code, output, _ = run(
        tmp_path, capfd, "--srch-algo", "random", "--num-trials", "2", space=space, opts=["SOLVER.WARMUP_ITERS", "0"]
    )
    assert code == 1 and not (output / "best_config.yaml").exists() and len(trials(output)) == 2


def test_population_based_training_exploits_and_loses_none(demo, tmp_path, capfd):
    space = "{lr: {loguniform: [1e-5, 1e-1]}, MODEL.LOSSES.TRI.MARGIN: {quniform: [0.0, 0.6, 0.1]}}"
    code, output, captured = run(tmp_path, capfd, "--pbt", "--num-trials", "4", space=space)
    assert code == 0, captured.err
    rows = trials(output)
    assert len(rows) == 4 and all(row["failure"] == "" and int(row["epochs"]) == 4 for row in rows)
    assert list(output.glob("search/pbt_policy_*.txt")), "no trial went on from another"
    assert all(1e-5 <= float(row["SOLVER.BASE_LR"]) <= 1e-1 for row in rows)
    for row in rows:  # four trials on two cores take turns
        told = reports(output / "search" / row["trial"] / "run/reports.jsonl")
        assert [report["epoch"] for report in told] == [1, 2, 3, 4]
        own = [each["score"] for each in told if each["values"]["SOLVER.BASE_LR"] == float(row["SOLVER.BASE_LR"])]
        assert float(row["score"]) == max(own)
    # The winner's file has the weights that its score is of.
    best = torch.load(output / "search" / rows[0]["trial"] / "run/model_best.pth", weights_only=True)
    bests = [state["best"] for state in best["trainer"]["hooks"].values() if "best" in (state or {})]
    assert bests == [float(rows[0]["score"])]


def test_refines_and_compares_the_winner_with_the_recipe(demo, tmp_path, capfd):
    flags = ["--num-trials", "2", "--then-refine", "1", "--train-best", "--seeds", "2"]
    code, output, captured = run(tmp_path, capfd, *flags, opts=["SEED", "5"])
    assert code == 0, captured.err
    rows = trials(output)
    assert Counter(row["stage"] for row in rows) == {"search": 2, "refine": 1}
    wide = max((row for row in rows if row["stage"] == "search"), key=lambda row: float(row["score"]))
    for row in rows:
        if row["stage"] == "refine":
            assert (
                0.5 < float(row["SOLVER.BASE_LR"]) / float(wide["SOLVER.BASE_LR"]) * 1.6 < 5.2
            )  # a third of 1000, in log
            assert row["SOLVER.OPT"] == wide["SOLVER.OPT"]
    with (output / "final.csv").open() as file:
        final = list(csv.DictReader(file))
    assert [(row["recipe"], row["seed"]) for row in final] == [
        (recipe, seed) for recipe in ("default", "best") for seed in ("5", "6")
    ]
    # What is compared is what train_net.py gives on as many cores as a trial has.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = ["OUTPUT_DIR", str(tmp_path / "again"), "SEED", "6"]
    again = ["--parts", str(tmp_path / "parts.py"), "--config-file", str(output / "best_config.yaml"), *options]
    assert train_net.cli(again) == 0
    torch.set_num_threads(threads)
    last = json.loads((tmp_path / "again/metrics.json").read_text().splitlines()[-1])
    assert float(final[3]["mAP"]) == last["Demo/mAP"]
    assert "| default" in captured.out and "mAP mean" in captured.out and "+/-" in captured.out

    # All of it is there already: nothing is trained again, and another search is refused.
    code, _, captured = run(tmp_path, capfd, *flags, "--resume", opts=["SEED", "5"])
    assert code == 0 and "mAP mean" in captured.out and "trial 1 of" not in captured.err
    for changed, message in (
        (["--resume", "--seed", "7"], "--seed was 0 and is 7"),
        (["--resume", "--num-trials", "4"], "--num-trials was 2 and is 4"),
        ([], "holds a search already"),
    ):
        code, _, captured = run(tmp_path, capfd, *flags, *changed, opts=["SEED", "5"])
        assert code == 2 and message in captured.err


def test_a_killed_search_goes_on(demo, tmp_path):
    options = ["SOLVER.MAX_EPOCH", "6", "SOLVER.STEPS", "(5,)"]
    flags = ["--srch-algo", "optuna", "--seed", "1", "--max-concurrent", "2"]
    words = [sys.executable, str(TUNE_NET), *arguments(tmp_path, *flags, opts=options)]
    output = tmp_path / "search"
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("trial 2 of 6"):
            break
    before = {}
    while not before:  # killed when a third trial is on its way
        before = {
            file.parent.parent.name: reports(file)
            for file in output.glob("search/trial_*/run/reports.jsonl")
            if file.parent.parent.name.removeprefix("trial_") not in line
        }
        before = before if len(before) > 2 else {}
        assert process.poll() is None
    process.kill()
    process.communicate()

    again = subprocess.run([*words[:2], "--resume", *words[2:]], capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    rows = trials(output)
    assert len(rows) == 6 and all(row["failure"] == "" for row in rows) and max(int(row["epochs"]) for row in rows) == 6
    assert set(before) <= {row["trial"] for row in rows}
    for row in rows:
        epochs = [report["epoch"] for report in reports(output / "search" / row["trial"] / "run/reports.jsonl")]
        assert epochs == list(range(1, len(epochs) + 1)), "an epoch was repeated or is missing"
    assert "trial 1 of 6" not in again.stderr and "trial 6 of 6" in again.stderr


def reports(file):
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def test_a_running_cluster_takes_the_trials(demo, tmp_path):
    ray = pytest.importorskip("ray")
    ray.shutdown()  # this process's own would be found
    flags = ["--address", "auto", "--num-trials", "2", "--srch-algo", "random", "--scheduler", "none"]
    options = ["SOLVER.MAX_EPOCH", "3", "SOLVER.STEPS", "(2,)"]
    words = [sys.executable, str(TUNE_NET), *arguments(tmp_path, *flags, opts=options)]
    # A cluster whose processes start elsewhere and know nothing of this one's variables.
    bare = {name: value for name, value in os.environ.items() if name != "FASTAMP_DATASETS"}
    start = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus", "2"]
    head = subprocess.Popen(
        [*start, "--port", "0", "--include-dashboard", "false"], cwd="/", env=bare, stdout=subprocess.PIPE, text=True
    )
    try:
        for line in head.stdout:
            if "Ray runtime started" in line:
                break
        search = subprocess.run(words, capture_output=True, text=True, timeout=240)
    finally:
        head.terminate()
        head.communicate()
    assert search.returncode == 0, search.stderr
    assert [int(row["epochs"]) for row in trials(tmp_path / "search")] == [3, 3]


def test_a_share_of_identities_that_leaves_none(demo, tmp_path, capfd):
    code, output, captured = run(tmp_path, capfd, opts=["TUNE.VAL_FRACTION", "0.99"])
    assert code == 2 and "TUNE.VAL_FRACTION 0.99 of 16 identities" in captured.err
    assert not (output / "search").exists()


@pytest.mark.parametrize(
    "flags, space, message",
    [
        (("--pbt",), "IDENTITIES: {randint: [2, 4]}", "IDENTITIES cannot change there"),
        (("--pbt", "--srch-algo", "optuna"), "lr: {uniform: [0.1, 1.0]}", "--srch-algo optuna would have no part"),
        (("--srch-algo", "bohb", "--scheduler", "asha"), "lr: {uniform: [0.1, 1.0]}", "--scheduler asha has none"),
        ((), "lr: {uniform: [-1, 1.0]}", "SOLVER.BASE_LR is -1.0"),
        ((), "IDENTITIES: {choice: [50]}", "the training part has 13 identities"),
        ((), "bsz: {choice: [500]}", "batches of up to 500 images, and the training part has 78"),
        ((), "SOLVER.BASE_LRR: {uniform: [0.1, 1.0]}", "SOLVER.BASE_LR"),
        (("--cpus-per-trial", "1000"), "lr: {uniform: [0.1, 1.0]}", "--cpus-per-trial 1000 is more than Ray found"),
    ],
)
def test_what_is_refused_before_any_trial(demo, tmp_path, capfd, flags, space, message):
    code, output, captured = run(tmp_path, capfd, *flags, space=space)
    assert code == 2 and message in captured.err and "Traceback" not in captured.err
    assert not list(output.glob("search/trial_*"))


def test_a_wrong_test_set_is_said_at_once(demo, tmp_path, capfd):
    code, output, captured = run(tmp_path, capfd, opts=["DATASETS.TESTS", "Dmeo"])
    assert code == 2 and "Did you mean 'Demo'?" in captured.err and not (output / "search").exists()
