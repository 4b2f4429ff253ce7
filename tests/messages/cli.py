"""Messages of fastamp/cli and fastamp/utils: commands, registries, files and old names."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch
from file_tracker import FileTracker, MissingTracker
from messages import Recorder
from torch import nn

import fastamp
from fastamp.config import get_cfg
from fastamp.modeling import BACKBONE_REGISTRY
from fastamp.serving.options import Limits, read_api_key
from fastamp.utils.compiled import compile_parts
from fastamp.utils.errors import check_choice, writing
from fastamp.utils.files import check_not_device
from fastamp.utils.lock import lock_folder, unlock_all
from fastamp.utils.moved import MODULES
from fastamp.utils.plugins import GROUP, naming_distribution
from fastamp.utils.trackers.tracker_process import start_tracker

SITES = ["fastamp/cli", "fastamp/utils", "fastamp/__init__.py", "fastamp/serving/options.py"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue("run_folder")
    commands(record, run)
    service(record, run)
    files(record)
    trackers(record)
    names(record)


class Parts(nn.Module):
    """Model that lists the modules to compile."""

    trunks = ("backbone",)
    backbone = nn.Identity()


def service(record, run):
    """Start the service with invalid options; it needs packages that are not installed."""
    found = importlib.util.find_spec
    installed = dict.fromkeys(("fastapi", "python_multipart", "prometheus_client"), True) | {"uvicorn": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: installed[name] if name in installed else found(name))
        record.fastamp("serve", run)
    key = record.file("key.txt", "secret")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FASTAMP_API_KEY", raising=False)
        for title, call in {
            "the limit images=0": lambda: Limits(images=0),
            "the limit queue=8": lambda: Limits(queue=8),
            "an API key in a missing file": lambda: read_api_key("missing.txt", "127.0.0.1"),
            "a short API key": lambda: read_api_key(str(key), "127.0.0.1"),
            "a service for other machines without an API key": lambda: read_api_key(None, "0.0.0.0"),
        }.items():
            with record(title):
                call()


def commands(record, run):
    """Run commands with invalid arguments."""
    best = run / "model_best.pth"
    empty = record.root / "empty"
    empty.mkdir()
    for argv in (
        ("trian",),
        ("train", "--resumee"),
        ("train", "--epochs", "3"),
        ("train", "--SOLVER.MAX_EPOCH", "3"),
        ("train", "SOLVER.MAX_EPOCH=3", "Demo/quickstart"),
        ("train", "Demo/quickstart", "Market1501/sbs_R50"),
        ("train", "SOLVER.BASE_LRR", "1"),
        ("eval",),
        ("eval", "MODEL.WEIGHTS", "nowhere.pth"),
        ("eval", "nowhere.pth"),
        ("eval", empty),
        ("eval", "Market1501/sbs_R50-ibn", "--config-file", "Market1501/sbs_R50"),
        ("eval", "Market1501/sbs_R50-ibn"),
        ("train", "Market1501/sbs_R50-ibm"),
        ("train", "Market1501/sbs_R50-ibm.yml"),
        ("train", empty),
        ("train", best, "--resume"),
        ("train", best, "--config-file", "Market1501/sbs_R50"),
        ("recipes", "Market1501/sbs_R50-ibm"),
        ("recipes", "VeRi"),
        ("init", run),
        ("init", record.root / "project", "--recipe", "Market1501/sbs_R50-ibm"),
        ("benchmark", "train_stop"),
        ("check-data", "Market1501/sbs_R50-ibn", "--write-clean", record.root / "clean.csv", "DATASETS.TESTS", "Demo"),
        ("search", best, "SEED", "1", "--gallery", "nowhere.npz"),
        ("search", best, "nowhere.png", "--gallery", run),
        ("compare", best, "a.jpg", "b.jpg", "--device", "cuda"),
        ("help", "trian"),
        ("evaluate-features", "nowhere.npz", "TEST.METRIC"),
        ("tune", "--cpus-per-trial", "1.5"),
        ("eval", "MODEL.WEIGHTS", best, "TEST.METRIC", "x"),
        ("eval", "MODEL.WEIGHTS", best, "OUTPUT_DIR", record.root / "eval"),
        ("doctor", "--dtypes", "int8"),
        ("doctor", "--batch", "0"),
        ("doctor", "--batch", "many"),
        ("check-data", "Demoo"),
        ("check-data", "Demo", "--write-clean", record.file("exists.csv")),
        ("check-data", "Market1501", "--output", record.root / "check"),
        ("split", "nowhere.csv", "--by", "closed", "--out", record.root / "split.csv"),
        ("split", "nowhere.csv", "--by", "year", "--out", record.root / "split.csv"),
        ("visualize", empty),
        ("visualize", best, "--num", "0"),
        ("visualize", best, "--dpi", "5"),
        ("compare", best, "a.jpg"),
        ("search", best, empty, "--gallery", "nowhere.npz", "--device", "cpu"),
        ("config", "list", "SOLVR"),
        ("config", "explain", "SOLVER.BASE_LRR"),
        ("config", "explain", "Market1501/sbs_R50"),
        ("config", "diff", empty, best),
        ("config", "convert", record.file("old.yml", "SOLVER: {MAX_ITER: 3}"), "-o", record.file("exists.yml")),
        ("strip", "nowhere.pth"),
        ("extract", best),
        ("push", best),
        ("push", best, "user/name"),
        ("push", best, "--to", record.root / "model"),
        ("push", best, "--to", record.root / "model", "--license", "MIT License"),
        ("push", best, "--to", record.root / "model", "--license", "other"),
        ("push", best, "--to", empty.parent, "--license", "mit"),
        ("push", "Market1501/sbs_R50-ibn", "--to", record.root / "model"),
        ("track", empty),
        ("track", empty, "--detections", record.file("det.txt", "1,-1,0,0,5,5,0.5"), "--min-confidence", "0.9"),
    ):
        record.fastamp(*argv)
    record.fastamp("extract", best, "Demo", "-o", record.root / "gallery.npz", "--splits", "gallery", "--device", "cpu")
    record.fastamp("search", best, empty, "--gallery", record.root / "gallery.npz", "--device", "cpu")
    group_by = ("--group-by", "specie", "--device", "cpu")
    record.fastamp("search", best, empty, "--gallery", record.root / "gallery.npz", *group_by)
    record.fastamp("push", best, "user/name", "--to", record.root / "model", "--license", "mit", output=True)
    record.fastamp("push", record.root / "model", "user/name", "--license", "apache-2.0")
    record.fastamp("cluster", record.root)
    record.fastamp("compare", record.root / "model.onnx", empty, empty, "TEST.METRIC=euclidean")
    record.fastamp("export", best, record.root / "model.onnx", "--format", "openvino", "--device", "cpu")
    record.fastamp("help", output=True)
    record.fastamp("init", record.root / "project", output=True)
    record.fastamp("config", "explain", "SOLVER.BASE_LR", output=True)
    record.fastamp("config", "explain", "NUM_WORKERS", output=True)
    record.fastamp("config", "list", "SOLVER.EMA", output=True)
    record.fastamp("config", "diff", best, best, output=True)
    torch.save(torch.load(best, weights_only=True)["model"], record.root / "bare.pth")
    record.fastamp("eval", "MODEL.WEIGHTS", record.root / "bare.pth")
    record.fastamp("train", "--dry-run", "--eval-only")
    record.fastamp("train", "--seeds", "1", "--eval-only")
    record.fastamp("compare", best, "a.jpg", "b.jpg", "--device", "cpu", "--opts", "SEED")
    for backend in ("inductor", "eager"):
        with record(f"MODEL.COMPILE {backend}"), pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.which", lambda *_, **__: None)
            compile_parts(nn.Linear(1, 1) if backend == "eager" else Parts(), backend)


def files(record):
    """Write to unwritable files and locked folders."""
    with record("writing a file in a folder that is missing"), writing(record.root / "missing/a.txt"):
        (record.root / "missing/a.txt").write_text("")
    with record("writing on a full disk"), writing(record.root / "a.txt"):
        raise OSError(28, "No space left on device")
    with record("reading a pipe"):
        os.mkfifo(record.root / "pipe")
        check_not_device(record.root / "pipe")
    folder = record.root / "locked"
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; from fastamp.utils.lock import lock_folder\n"
         "lock_folder(sys.argv[1], 'OUTPUT_DIR'); print('locked', flush=True); sys.stdin.read()", str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "locked\n"
        record.fastamp("train", "OUTPUT_DIR", folder, "MODEL.DEVICE", "cpu")
        with record("lock_folder of another process"), pytest.MonkeyPatch.context() as patch:
            patch.setattr("fastamp.utils.lock._WAIT_SECONDS", 0)
            lock_folder(folder, "OUTPUT_DIR")
    finally:
        holder.communicate()
    with record("lock_folder without locks"), pytest.MonkeyPatch.context() as patch:

        def fail(*_):
            raise OSError(37, "No locks available")

        patch.setattr("fcntl.lockf", fail)
        lock_folder(record.root / "unlocked", "OUTPUT_DIR")
    unlock_all()


def trackers(record):
    """Track a run by a service that is not installed, fails, hangs or ends."""
    cfg = get_cfg().with_values({"OUTPUT_DIR": str(record.root / "tracked"), "TRACKING.TIMEOUT": 30.0})
    with record("a tracker whose package is missing"):
        start_tracker(MissingTracker, cfg)
    with record("a tracker in a folder below a file"):
        start_tracker(FileTracker, cfg.with_values({"OUTPUT_DIR": str(record.file("in_the_way"))}))
    record.file("tracked/report.html")
    for fault, timeout in (("raise in log 5", 30.0), ("exit in start", 30.0), ("hang in start", 0.5)):
        with record(f"a tracker: {fault}"):
            values = {"TRACKING.TAGS": (fault,), "TRACKING.TIMEOUT": timeout}
            writer = start_tracker(FileTracker, cfg.with_values(values))
            writer.write(5, {"loss": 1.0})
            writer.close()


def names(record):
    """Access unknown and renamed Python names and registry entries."""
    plugin = EntryPoint("mine", "my_losses", GROUP)
    with record("an installed plugin that needs a missing package"), naming_distribution(plugin):
        raise ModuleNotFoundError("No module named 'missing'")
    with record("fastamp.Predicter"):
        fastamp.Predicter  # noqa: B018
    with record("check_choice"):
        check_choice("TEST.KEY", "treu", ("true", "false"))
    with record("Registry.get"):
        BACKBONE_REGISTRY.get("build_resnet_backbon")
    with record("Registry.register twice"):
        BACKBONE_REGISTRY.register("build_resnet_backbone")(invoke)
    old = next(iter(MODULES))
    with record(f"import {old}"), pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, old, raising=False)
        importlib.import_module(old)
    moved = importlib.import_module("fastamp.engine.setup")
    with record("from fastamp.engine.setup import read_config"):
        moved.read_config  # noqa: B018
    with record("from fastamp.engine.setup import read_configs"):
        moved.read_configs  # noqa: B018
    from fastamp.evaluation import Identities
    from fastamp.evaluation.metrics import rank_distances
    from fastamp.evaluation.query_expansion import QueryExpansion

    with record("an old keyword argument"):
        one = torch.zeros(1, dtype=torch.int64)
        rank_distances(torch.zeros(1, 1), ids=Identities(one, one, one, one + 1))
    with record("an old attribute"):
        QueryExpansion().sides  # noqa: B018
    with record("an old and a new keyword argument"):
        rank_distances(None, ids=1, identities=2)
