"""Messages of projects/ and tools/: FastTune, the open loop and the soak test."""

import sys
from dataclasses import replace

import pytest
from messages import Recorder
from tiny import tiny_options

from fastamp.config import get_cfg, read_config

TOOLS = ("plain_train_net", "soak")
SITES = ["projects", *(f"tools/{name}.py" for name in TOOLS)]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    search_spaces(record)
    searches(record)
    open_loop(record)
    soak(record)


SPACES = (
    "SOLVER.BASE_LRR: {uniform: [0.1, 0.2]}",
    "SOLVER.BASE_LR: {uniform: [-1.0, 0.2]}",
    "SOLVER.BASE_LR: {uniforn: [0.1, 0.2]}",
    "SOLVER.BASE_LR: {uniform: [0.2, 0.1]}",
    "SOLVER.BASE_LR: {uniform: [0.2]}",
    "SOLVER.BASE_LR: {uniform: [a, b]}",
    "SOLVER.BASE_LR: {quniform: [0.0, 1.0, 0.0]}",
    "SOLVER.BASE_LR: {loguniform: [0, 1.0]}",
    "SOLVER.BASE_LR: {randint: [0.5, 2]}",
    "SOLVER.BASE_LR: 0.1",
    "SOLVER.BASE_LR: {choice: []}",
    "SOLVER.WARMUP_ITERS: {uniform: [10, 20]}",
    "SOLVER.OPT: {choice: [3, [Adam]]}",
    "SOLVER.OPT: {uniform: [0, 1]}",
    "SOLVER.MAX_EPOCH: {choice: [2, 4]}",
    "SOLVER: {BASE_LR: {uniform: [0.1, 1.0]}}",
    "IDENTITIES: {randint: [0, 4]}",
    "IDENTITIES: {loguniform: [1, 4]}",
    "IDENTITIES: {choice: [2.5, 4]}",
    "{bsz: {choice: [64]}, IDENTITIES: {randint: [4, 8]}}",
    "{lr: {uniform: [0.1, 1.0]}, SOLVER.BASE_LR: {uniform: [0.1, 1.0]}}",
    "",
    "[1, 2]",
)


def search_spaces(record):
    """Read invalid FastTune search spaces."""
    from autotuner.space import default_space, read_space

    for text in SPACES:
        path = record.file("space.yml", text)
        with record(f"--space: {text}"):
            read_space(path, get_cfg())
    for name, content in (("nowhere.yml", None), ("bytes.yml", b"\xff\xfe\x00")):
        if content:
            record.file(name, content)
        with record(f"--space {name}"):
            read_space(record.root / name, get_cfg())
    with record("--config-file mine.yml without --space"):
        default_space("mine.yml")


def searches(record):
    """Start FastTune searches with invalid settings."""
    import tune_net
    from autotuner import disk
    from autotuner.algorithms import check_installed
    from autotuner.search import Search, _check_folder
    from autotuner.space import read_space

    space = record.file("good.yml", "lr: {loguniform: [1e-4, 1e-1]}")
    identities = record.file("identities.yml", "IDENTITIES: {choice: [50]}")
    batches = record.file("batches.yml", "bsz: {choice: [500]}")
    optimizer = record.file("optimizer.yml", "SOLVER.OPT: {choice: [Adam, SGD]}")
    train_only = record.file("train_only.csv", "path,pid\na.png,1")
    config = record.file("tiny.yml", read_config("", tiny_options("logs/tiny")).dump())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ray", "hyperopt", "hpbandster", "ConfigSpace"):
            patch.setitem(sys.modules, name, None)
        for argv in (
            ("--space", space, "--srch-algo", "bohb", "--scheduler", "asha"),
            ("--space", space, "--srch-algo", "bohb"),
            ("--space", space, "--pbt", "--srch-algo", "optuna"),
            ("--space", space, "--pbt", "--scheduler", "asha"),
            ("--space", optimizer, "--pbt"),
            ("--space", space),
            ("--space", space, "--srch-algo", "random"),
            ("--space", space, "--num-trials", "0"),
            ("--space", space, "--seed", "-1"),
            ("--space", space, "--cpus-per-trial", "0.5x"),
            ("--space", identities, "--srch-algo", "random"),
            ("--space", batches, "--srch-algo", "random"),
            ("--space", space, "--srch-algo", "random", "TUNE.VAL_FRACTION", "0.99"),
            ("--space", space, "--srch-algo", "random", "DATASETS.TESTS", "Dmeo", "LOGGERS", "wandb"),
            ("--space", space, "--srch-algo", "random", "LOGGERS", "wandbb"),
            ("--space", space, "--srch-algo", "random", "DATASETS.TESTS", f"csv:{train_only}"),
            ("--space", space, "--srch-algo", "random", "MODEL.DEVICE", "cuda:1"),
            ("--srch-algo", "random"),
            ("--space", space, "--srch-algo", "random", "--parts", "nowhere.py"),
        ):
            output = ("OUTPUT_DIR", record.root / "search")
            record.command(tune_net.cli, "tune_net.py", "--config-file", config, *argv, *output)
        usage = disk.shutil.disk_usage(record.root)
        cfg = read_config(str(config), [])
        search = Search(title="search", folder=record.root / "s", cfg=cfg, space=read_space(space, cfg), trials=4)
        with record("a new search"):
            _check_folder(search, resume=False)
        for title, changed, resume in (
            ("a search into the same folder", search, False),
            ("a resume with more trials", replace(search, trials=9), True),
            ("a resume with another seed", replace(search, seed=3), True),
        ):
            with record(title):
                _check_folder(changed, resume=resume)
        with record("optuna is not installed"):
            patch.setitem(sys.modules, "optuna", None)
            check_installed("optuna")
        for free in (10**12, 100_000):
            patch.setattr(disk.shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
            with record(f"{free} bytes are free for a search"):
                disk.check_disk(search, 16, concurrent=2)
        from autotuner import picture

        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with record("a search without matplotlib"):
            picture.draw_trials([], search.space, record.root / "trials.png")


def open_loop(record):
    """Trigger the messages of tools/plain_train_net.py."""
    import plain_train_net

    from fastamp.cli.train import argument_parser
    from fastamp.engine import run_command_line

    def run(argv):
        return run_command_line(lambda: plain_train_net.main(argument_parser().parse_args(argv)))

    config = record.file("plain.yml", read_config("", tiny_options("logs/tiny", "SOLVER.MAX_EPOCH", "2")).dump())
    for argv in (
        ("--resume",),
        ("SOLVER.EMA", "True"),
        ("--resume", "SOLVER.MAX_EPOCH", "3", "SOLVER.IMS_PER_BATCH", "8"),
    ):
        output = ("OUTPUT_DIR", record.root / "plain")
        record.command(run, "tools/plain_train_net.py", "--config-file", config, *argv, *output)


def soak(record):
    """Run tools/soak.py with too few kills, and with a non-empty OUTPUT_DIR."""
    import soak as tool

    config = ("--config-file", record.root / "plain.yml")
    record.command(tool.cli, "tools/soak.py", *config, "--kills", "2")
    record.file("full/file")
    record.command(tool.cli, "tools/soak.py", *config, "OUTPUT_DIR", record.root / "full")
