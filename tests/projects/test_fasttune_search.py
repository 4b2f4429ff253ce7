"""FastTune command line: searches, their results, failures and resume."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import train_net
import tune_net
from autotuner.search import read_outcomes

from fastamp.config import get_cfg, read_config
from fastamp.data.build import build_dataset
from fastamp.inference import Predictor

pytestmark = pytest.mark.tune

SPACE = """
lr: {loguniform: [1e-4, 1e-1]}
SOLVER.OPT: {choice: [Adam, SGD]}
SOLVER.WARMUP_ITERS: {quniform: [0, 12, 4]}
IDENTITIES: {randint: [2, 4]}
DATALOADER.NUM_INSTANCE: {choice: [2, 4]}
"""
# The plugin imports tiny once per process, and registers a backbone that raises for one learning rate and records the
# number of threads, as long as the folder of the test that registered it exists.
PARTS = f"""
import os
import sys
from pathlib import Path
import torch
sys.path.append({str(Path(tiny.__file__).parent.resolve())!r})
import tiny
from fastamp.modeling import BACKBONE_REGISTRY

def build_fragile_backbone(cfg):
    if Path(__file__).parent.is_dir():
        with Path(__file__).with_name("threads.txt").open("a") as file:
            file.write(f"{{os.getpid()}} {{torch.get_num_threads()}}\\n")
    if cfg.SOLVER.BASE_LR == 0.5:
        raise RuntimeError("broken backbone")
    return tiny.build_tiny_backbone(cfg)

if "build_fragile_backbone" not in BACKBONE_REGISTRY:
    BACKBONE_REGISTRY.register()(build_fragile_backbone)
"""
TUNE_NET = Path(tune_net.__file__).resolve()


def arguments(tmp_path, *flags, opts=(), space=SPACE):
    (tmp_path / "space.yml").write_text(space)
    (tmp_path / "plugin.py").write_text(PARTS)
    (tmp_path / "base.yml").write_text("SOLVER: {AMP: bf16}\n")
    options = tiny.tiny_options(tmp_path / "search", "SOLVER.MAX_EPOCH", "4", "TEST.EVAL_PERIOD", "1", *opts)
    return [
        *("--config-file", str(tmp_path / "base.yml"), "--space", str(tmp_path / "space.yml")),
        *("--plugin", str(tmp_path / "plugin.py"), "--num-trials", "6", *flags, *options),
    ]


def run(tmp_path, capfd, *flags, opts=(), space=SPACE):
    code = tune_net.cli(arguments(tmp_path, *flags, opts=opts, space=space))
    return code, tmp_path / "search", capfd.readouterr()


def own_images(tmp_path):
    """Return options that select a CSV dataset of the demo images, and the name of that dataset."""
    demo = build_dataset("Demo")
    name = f"csv:{tmp_path / 'mine.csv'}"
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "pid", "camid", "split"])
        for split in ("train", "query", "gallery"):
            lines.writerows([item.path, item.pid, item.camid, split] for item in getattr(demo, split))
    return ["DATASETS.NAMES", name, "DATASETS.TESTS", name], name


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
def test_fasttune_search_completes_with_each_algorithm_and_scheduler(demo, tmp_path, capfd, flags):
    if "bohb" in flags:
        pytest.importorskip("hpbandster", reason="the extra bohb is not installed")
    data, name = own_images(tmp_path)
    code, output, captured = run(tmp_path, capfd, *flags, opts=data)
    assert code == 0, captured.err
    rows = trials(output)
    assert len(rows) == 6 and all(row["failure"] == "" for row in rows)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True) and scores[0] > 0
    for row in rows:
        assert float(row["score"]) == pytest.approx((float(row["mAP"]) + float(row["Rank-1"])) / 2)
        assert float(row["images_per_second"]) > 0 and float(row["peak_memory_mb"]) > 0 and row["skipped_steps"]
    # Some trials are stopped, but none before warm-up ends: 78 images are at least 6 batches, so 12 steps are 2 epochs.
    assert max(int(row["epochs"]) for row in rows) == 4 and min(int(row["epochs"]) for row in rows) == 2
    log = (output / "log.txt").read_text()
    assert all(text in log for text in ("disk space", "trial 6 of 6", "best so far", "left", "| stage", "winner"))
    # Only the weights of the winner are kept; their config has the original dataset names.
    best = output / "search" / rows[0]["trial"] / "run/model_best.pth"
    assert list(output.rglob("*.pth")) == [best]
    predictor = Predictor(best)
    assert list(predictor.cfg.DATASETS.TESTS) == [name]
    assert (output / "trials.png").read_bytes()[1:4] == b"PNG"

    best = read_config(str(output / "best_config.yaml"))
    assert float(rows[0]["SOLVER.BASE_LR"]) == best.SOLVER.BASE_LR
    assert int(rows[0]["IDENTITIES"]) * best.DATALOADER.NUM_INSTANCE == best.SOLVER.IMS_PER_BATCH
    assert best.DATASETS.NAMES == best.DATASETS.TESTS == (name,) and best.SOLVER.AMP.DTYPE == "bfloat16"

    if "asha" not in flags:  # simulate a killed search
        (output / "search/outcomes.json").unlink()
        code, _, captured = run(tmp_path, capfd, *flags, "--resume", opts=data)
        assert code == 2 and "cannot be resumed" in captured.err


def test_fasttune_ranks_failed_trials_last_and_finishes_remaining_trials(demo, tmp_path, capfd):
    space = "SOLVER.BASE_LR: {choice: [1e-2, 1e+30, 0.5]}"
    options = ["SOLVER.WARMUP_ITERS", "0", "MODEL.BACKBONE.NAME", "build_fragile_backbone"]
    # With this seed, two trials succeed, one crashes and one fails.
    flags = ["--srch-algo", "random", "--scheduler", "none", "--seed", "11", "--num-trials", "4"]
    code, output, captured = run(tmp_path, capfd, *flags, space=space, opts=options)
    assert code == 0, captured.err
    rows = trials(output)
    kinds = Counter(
        "success" if not row["failure"] else "crash" if "broken backbone" in row["failure"] else "failure"
        for row in rows
    )
    assert kinds == {"success": 2, "crash": 1, "failure": 1}
    assert "2 of 4 trials failed" in captured.out
    successful = [row for row in rows if not row["failure"]]
    assert rows[: len(successful)] == successful  # failed trials are ranked last
    # Trials with the same values are identical, regardless of failures of other trials.
    assert len({row["score"] for row in successful}) == 1 and {row["SOLVER.BASE_LR"] for row in successful} == {"0.01"}

    again = ["--plugin", str(tmp_path / "plugin.py"), "--config-file", str(output / "best_config.yaml")]
    assert train_net.cli([*again, "OUTPUT_DIR", str(tmp_path / "again")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "again/metrics.json").read_text().splitlines()]
    assert rows[-1]["Demo/mAP"] > 0


def test_fasttune_exits_with_1_if_all_trials_fail(demo, tmp_path, capfd):
    space = "SOLVER.BASE_LR: {choice: [1e+30]}"
    code, output, _ = run(
        tmp_path, capfd, "--srch-algo", "random", "--num-trials", "2", space=space, opts=["SOLVER.WARMUP_ITERS", "0"]
    )
    assert code == 1 and not (output / "best_config.yaml").exists() and len(trials(output)) == 2


# The command of the README with smaller numbers.
def test_pbt_search_copies_checkpoints_and_keeps_all_trials(demo, tmp_path, capfd):
    space = """
    lr: {loguniform: [1e-5, 1e-1]}
    wd: {loguniform: [1e-6, 1e-1]}
    MODEL.LOSSES.TRI.MARGIN: {quniform: [0.0, 0.6, 0.1]}
    """
    data, _ = own_images(tmp_path)
    flags = ["--pbt", "--num-trials", "4", "--then-refine", "2", "--train-best", "--seeds", "2"]
    code, output, captured = run(tmp_path, capfd, *flags, space=space, opts=data)
    assert code == 0, captured.err
    rows = [row for row in trials(output) if row["stage"] == "search"]
    assert len(trials(output)) == 6 and all(row["failure"] == "" for row in trials(output))
    assert len(rows) == 4 and all(int(row["epochs"]) == 4 for row in rows)
    assert list(output.glob("search/pbt_policy_*.txt")), "no trial continued from another"
    assert all(1e-5 <= float(row["SOLVER.BASE_LR"]) <= 1e-1 for row in rows)
    log, parents = (output / "log.txt").read_text(), []
    for row in rows:  # four trials share two cores
        told = reports(output / "search" / row["trial"] / "run/reports.jsonl")
        assert [report["epoch"] for report in told] == [1, 2, 3, 4]
        scores = [
            report["score"] for report in told if report["values"]["SOLVER.BASE_LR"] == float(row["SOLVER.BASE_LR"])
        ]
        assert float(row["score"]) == max(scores)
        parents += [report["parent"] for report in told if "parent" in report]
        # The log line of a trial has its own scores, even if it was copied from another trial.
        line = next(line for line in log.splitlines() if f"({row['trial'].removeprefix('trial_')}): epoch" in line)
        assert f"{told[-1]['score']:.2f}" in line and f"{max(scores):.2f}" in line
    assert parents and all(f"trial_{name}" in {row["trial"] for row in rows} for _, name in parents)
    # model_best.pth of the winner has the weights of its score.
    best = torch.load(output / "search" / rows[0]["trial"] / "run/model_best.pth", weights_only=True)
    bests = [state["best"] for state in best["trainer"]["hooks"].values() if "best" in (state or {})]
    assert bests == [float(rows[0]["score"])]
    with (output / "final.csv").open() as file:
        assert [row["failure"] for row in csv.DictReader(file)] == [""] * 4
    # Finished trials keep no checkpoints, except for the winner's weights; final trainings keep their weights.
    kept = Counter(file.relative_to(output).parts[0] for file in output.rglob("*.pth"))
    assert kept["search"] == kept["refine"] == 1 and kept["default"] == 2


def test_pbt_search_ends_when_all_trials_fail(demo, tmp_path):
    space = "SOLVER.BASE_LR: {choice: [1e+30]}"
    flags = ["--pbt", "--num-trials", "3"]
    words = arguments(tmp_path, *flags, space=space, opts=["SOLVER.WARMUP_ITERS", "0"])
    done = subprocess.run([sys.executable, str(TUNE_NET), *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "no trial was evaluated" in done.stdout
    assert [bool(row["failure"]) for row in trials(tmp_path / "search")] == [True] * 3


def test_pbt_search_does_not_wait_for_ended_trials(demo, tmp_path):
    """The population is perturbed without the ended trial, immediately if all other trials are waiting for it."""
    tune = pytest.importorskip("ray.tune")
    from autotuner.algorithms import ray_space, scheduler
    from autotuner.search import start_ray
    from autotuner.settings import Search
    from autotuner.space import Parameter, Space

    space = Space([Parameter("SOLVER.BASE_LR", "uniform", (0.0, 1.0))])
    cfg = get_cfg().with_values({"SOLVER.MAX_EPOCH": 4, "TEST.EVAL_PERIOD": 1})
    search = Search(title="search", folder=tmp_path, cfg=cfg, space=space, algorithm="random", scheduler="pbt")
    start_ray(search, address="")

    def trial(config):
        context = tune.get_context()
        number = int(context.get_trial_id().split("_")[1])
        began = 0
        if (checkpoint := tune.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                began = int((Path(folder) / "round").read_text())
        for now in range(began + 1, 5):
            if number == 2 and now == 2:
                # End after all other trials have reported their second round.
                while not all(tmp_path.joinpath(f"{other}-2").exists() for other in (0, 1, 3)):
                    time.sleep(0.1)
                time.sleep(1)
                return
            folder = tmp_path / f"checkpoint-{number}-{now}"
            folder.mkdir(exist_ok=True)
            (folder / "round").write_text(str(now))
            tmp_path.joinpath(f"{number}-{now}").touch()
            tune.report({"score": float(number), "round": now}, checkpoint=tune.Checkpoint.from_directory(folder))

    results = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.25}),
        param_space=ray_space(space, "random"),
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=4,
            scheduler=scheduler(search),
        ),
        run_config=tune.RunConfig(name="search", storage_path=str(tmp_path / "ray"), verbose=0),
    ).fit()
    assert [result.error for result in results] == [None] * 4
    assert sorted(result.metrics["round"] for result in results if result.metrics) == [1, 4, 4, 4]
    assert list(tmp_path.glob("ray/search/pbt_policy_*.txt")), "no trial continued from another"


def test_fasttune_refines_around_winner_and_compares_winner_with_recipe(demo, tmp_path, capfd):
    flags = ["--num-trials", "2", "--then-refine", "1", "--train-best", "--seeds", "2"]
    code, output, captured = run(tmp_path, capfd, *flags, opts=["SEED", "5"])
    assert code == 0, captured.err
    rows = trials(output)
    assert Counter(row["stage"] for row in rows) == {"search": 2, "refine": 1}
    first_stage = max((row for row in rows if row["stage"] == "search"), key=lambda row: float(row["score"]))
    for row in rows:
        if row["stage"] == "refine":
            assert (
                0.5 < float(row["SOLVER.BASE_LR"]) / float(first_stage["SOLVER.BASE_LR"]) * 1.6 < 5.2
            )  # a third of 1000, in log
            assert row["SOLVER.OPT"] == first_stage["SOLVER.OPT"]
    with (output / "final.csv").open() as file:
        final = list(csv.DictReader(file))
    assert [(row["recipe"], row["seed"]) for row in final] == [
        (recipe, seed) for recipe in ("default", "best") for seed in ("5", "6")
    ]
    # The comparison is reproducible with train_net.py on the same number of cores.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = ["OUTPUT_DIR", str(tmp_path / "again"), "SEED", "6"]
    again = ["--plugin", str(tmp_path / "plugin.py"), "--config-file", str(output / "best_config.yaml"), *options]
    assert train_net.cli(again) == 0
    torch.set_num_threads(threads)
    last = json.loads((tmp_path / "again/metrics.json").read_text().splitlines()[-1])
    assert float(final[3]["mAP"]) == last["Demo/mAP"]
    assert "| default" in captured.out and "mAP mean" in captured.out and "+/-" in captured.out

    # A second run trains nothing; other settings are an error.
    code, _, captured = run(tmp_path, capfd, *flags, "--resume", opts=["SEED", "5"])
    assert code == 0 and "mAP mean" in captured.out and "trial 1 of" not in captured.out
    for changed, message in (
        (["--resume", "--seed", "7"], "--seed"),
        (["--resume", "--num-trials", "4"], "--num-trials"),
        ([], "--resume"),
    ):
        code, _, captured = run(tmp_path, capfd, *flags, *changed, opts=["SEED", "5"])
        assert code == 2 and message in captured.err


def test_resumed_asha_restores_rungs_after_search_folder_was_moved(tmp_path):
    pytest.importorskip("ray.tune")
    from autotuner.algorithms import scheduler
    from autotuner.settings import Search
    from autotuner.space import Space
    from autotuner.tune_hooks import ROUND, SCORE
    from ray import cloudpickle

    cfg = get_cfg().with_values({"SOLVER.MAX_EPOCH": 9, "TEST.EVAL_PERIOD": 1})
    asha = scheduler(Search(title="search", folder=tmp_path, cfg=cfg, space=Space([])))
    asha.set_search_properties(SCORE, "max")
    (tmp_path / "old").mkdir()
    run_dirs = [tmp_path / f"old/trial_{number}/run" for number in range(3)]
    for number, folder in enumerate(run_dirs):
        folder.mkdir(parents=True)
        report = {SCORE: float(number), ROUND: 1, "trial_id": str(number)}
        (folder / "reports.jsonl").write_text(json.dumps(report) + "\n")
    (tmp_path / "old").rename(tmp_path / "new")
    resumed = cloudpickle.loads(cloudpickle.dumps(asha))
    for number in range(3):
        storage = SimpleNamespace(trial_dir_name=f"trial_{number}")
        trial = SimpleNamespace(trial_id=str(number), path=str(tmp_path / f"new/trial_{number}"), storage=storage)
        resumed.on_trial_add(None, trial)
    rung = resumed._brackets[0]._rungs[-1]
    assert rung[1] == {"0": 0.0, "1": 1.0, "2": 2.0}


def test_read_outcomes_uses_new_path_after_search_folder_was_moved(tmp_path):
    outcome = {
        "stage": "search",
        "name": "trial_1",
        "values": {},
        "score": 1.0,
        "epochs": 1,
        "failure": "",
        "history": [],
    }
    (tmp_path / "outcomes.json").write_text(json.dumps([outcome | {"folder": "/moved/search/trial_1/run"}]))
    assert [read_outcome.folder for read_outcome in read_outcomes(tmp_path)] == [tmp_path / "trial_1/run"]


@pytest.mark.parametrize("how", ["killed", "SIGTERM"])
def test_killed_or_terminated_search_keeps_results_and_resumes(demo, tmp_path, how):
    options = ["SOLVER.MAX_EPOCH", "6", "SOLVER.STEPS", "(5,)", "MODEL.BACKBONE.NAME", "build_fragile_backbone"]
    flags = ["--srch-algo", "optuna", "--seed", "1", "--max-concurrent", "2"]
    words = [sys.executable, str(TUNE_NET), *arguments(tmp_path, *flags, opts=options)]
    output = tmp_path / "search"
    # The signal is also sent to Ray's processes, as when a cluster preempts a machine.
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    for line in process.stdout:
        if "trial 2 of 6" in line:
            break
    before = {}
    while not before:  # until a third trial is running
        before = {
            file.parent.parent.name: reports(file)
            for file in output.glob("search/trial_*/run/reports.jsonl")
            if file.parent.parent.name.removeprefix("trial_") not in line
        }
        before = before if len(before) > 2 else {}
        assert process.poll() is None
    if how == "killed":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGTERM)
    output_text, _ = process.communicate(timeout=240)
    assert process.returncode == (-signal.SIGKILL if how == "killed" else 128 + signal.SIGTERM), output_text
    assert len(trials(output)) >= 2 and all(row["score"] for row in trials(output))
    best = read_config(str(output / "best_config.yaml"))
    assert float(trials(output)[0]["SOLVER.BASE_LR"]) == best.SOLVER.BASE_LR
    if how != "killed":
        return

    again = subprocess.run(
        [*words[:2], "--resume", *words[2:]],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert again.returncode == 0, again.stderr
    rows = trials(output)
    assert len(rows) == 6 and all(row["failure"] == "" for row in rows) and max(int(row["epochs"]) for row in rows) == 6
    assert set(before) <= {row["trial"] for row in rows}
    for row in rows:
        epochs = [report["epoch"] for report in reports(output / "search" / row["trial"] / "run/reports.jsonl")]
        assert epochs == list(range(1, len(epochs) + 1)), "an epoch was repeated or is missing"
    assert "trial 1 of 6" not in again.stdout and "trial 6 of 6" in again.stdout
    # A trial has one thread per CPU, independent of OMP_NUM_THREADS.
    threads = dict(line.split() for line in (tmp_path / "threads.txt").read_text().splitlines())
    assert threads.pop(str(process.pid)) == "2" and len(threads) > 3 and set(threads.values()) == {"1"}


def reports(file):
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]


def test_fasttune_search_continues_after_ray_cluster_loses_a_node(demo, tmp_path):
    ray = pytest.importorskip("ray")
    ray.shutdown()  # otherwise the Ray instance of this process would be found
    flags = ["--address", "auto", "--num-trials", "2", "--srch-algo", "random", "--scheduler", "none"]
    options = ["SOLVER.MAX_EPOCH", "12", "SOLVER.STEPS", "(8,)"]
    words = [sys.executable, str(TUNE_NET), *arguments(tmp_path, *flags, "--max-failures", "1", opts=options)]
    # The cluster's processes have another working folder and environment.
    bare = {name: value for name, value in os.environ.items() if name != "FASTAMP_DATASETS"}
    start = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus", "1"]

    def node(*flags):
        process = subprocess.Popen(
            [*start, *flags], cwd="/", env=bare, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                break
        return process, "".join(lines)

    head, printed = node("--head", "--port", "0", "--include-dashboard", "false")
    second = search = None
    try:
        for line in head.stdout:
            printed += line
            if "--address=" in printed:
                break
        second, _ = node("--address", re.search(r"--address=\W*([\d.]+:\d+)", printed)[1])
        search = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        trained = []
        while len(trained) < 2:  # until one trial runs on each node
            trained = [file for file in tmp_path.glob("search/search/trial_*/run/reports.jsonl") if reports(file)]
            assert search.poll() is None, search.communicate()[0]
        pids = subprocess.run(["ps", "-o", "pid=", "--sid", str(second.pid)], capture_output=True, text=True).stdout
        for pid in pids.split():
            os.kill(int(pid), signal.SIGKILL)
        printed, _ = search.communicate(timeout=240)
    finally:
        for process in (search, second, head):
            if process is not None and process.poll() is None:
                process.terminate()
                process.communicate()
    assert search.returncode == 0, printed
    assert [(int(row["epochs"]), row["failure"]) for row in trials(tmp_path / "search")] == [(12, "")] * 2
    for file in trained:
        epochs = [report["epoch"] for report in reports(file)]
        # At most the epoch whose report the driver did not receive is trained again.
        assert epochs == sorted(epochs) and len(epochs) - len(set(epochs)) <= 1, "epochs were trained again"


def test_fasttune_exits_with_2_if_validation_fraction_leaves_no_training_identities(demo, tmp_path, capfd):
    code, output, captured = run(tmp_path, capfd, opts=["TUNE.VAL_FRACTION", "0.99"])
    assert code == 2 and "TUNE.VAL_FRACTION is 0.99" in captured.err
    assert not (output / "search").exists()


@pytest.mark.parametrize(
    "flags, space, message",
    [
        (("--pbt",), "IDENTITIES: {randint: [2, 4]}", "IDENTITIES"),
        (("--pbt", "--srch-algo", "optuna"), "lr: {uniform: [0.1, 1.0]}", "--srch-algo optuna"),
        (("--srch-algo", "bohb", "--scheduler", "asha"), "lr: {uniform: [0.1, 1.0]}", "--scheduler asha"),
        ((), "lr: {uniform: [-1, 1.0]}", "SOLVER.BASE_LR"),
        ((), "IDENTITIES: {choice: [50]}", "13 identities"),
        ((), "bsz: {choice: [500]}", "500"),
        ((), "SOLVER.BASE_LRR: {uniform: [0.1, 1.0]}", "SOLVER.BASE_LR"),
        (("--cpus-per-trial", "1000"), "lr: {uniform: [0.1, 1.0]}", "--cpus-per-trial"),
    ],
)
def test_fasttune_with_invalid_settings_exits_with_2_before_any_trial(demo, tmp_path, capfd, flags, space, message):
    code, output, captured = run(tmp_path, capfd, *flags, space=space)
    assert code == 2 and message in captured.err and "Traceback" not in captured.err
    assert not list(output.glob("search/trial_*"))


def test_fasttune_with_unknown_test_set_exits_with_2_before_any_trial(demo, tmp_path, capfd):
    code, output, captured = run(tmp_path, capfd, opts=["DATASETS.TESTS", "Dmeo"])
    assert code == 2 and "'Demo'" in captured.err and not (output / "search").exists()
