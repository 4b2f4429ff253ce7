"""Messages of fastamp/engine and fastamp/diagnostics: training, resuming, evaluation, pre-flight and replay."""

import resource
import shutil
import signal
import subprocess
import sys

import pytest
import tiny
import torch
from conv_net import Hungry, Net, make_batch, policy
from messages import Recorder
from torch import nn

from fastamp.amp import LossScaler
from fastamp.config import get_cfg
from fastamp.diagnostics.config_check import check_config
from fastamp.diagnostics.preflight import preflight
from fastamp.engine import DefaultTrainer, HookBase, SimpleTrainer, default_setup, launch
from fastamp.engine.dry_run import dry_run
from fastamp.engine.hooks import FreezeClassifier
from fastamp.modeling import BACKBONE_REGISTRY, META_ARCH_REGISTRY
from fastamp.modeling.meta_arch import Baseline
from fastamp.utils import comm
from fastamp.utils.errors import DataError

SITES = ["fastamp/engine", "fastamp/diagnostics"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    register()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        configs(record)
        default_device(record)
        trainings(record)
        resumes(record)
        changed_checkpoints(record)
        failures(record)
        interruptions(record)
        evaluations(record)
        preflights(record)
        precision(record)
        doctor(record)
        several_processes(record)
        processes(record, patch)
        files(record)


def register():
    """Register faulty models; they are removed from the registries afterwards."""

    @META_ARCH_REGISTRY.register("MessagesLoud")
    class Loud(Baseline):
        def forward(self, batch):
            out = super().forward(batch)
            return {name: 100 * loss for name, loss in out.items()} if self.training else out

    @META_ARCH_REGISTRY.register("MessagesTuple")
    class Tuple(Baseline):
        def forward(self, batch):
            out = super().forward(batch)
            return out if self.training else (out, out)

    @BACKBONE_REGISTRY.register("build_messages_overflow_backbone")
    def build_overflow_backbone(cfg):
        net = tiny.build_tiny_backbone(cfg)
        with torch.no_grad():
            net[4].weight.mul_(1e6)
        return net

    @BACKBONE_REGISTRY.register("build_messages_rgb_backbone")
    def build_rgb_backbone(cfg):
        return tiny.build_tiny_backbone(cfg.with_values({"INPUT.CHANNELS": 3}))


def configs(record):
    """Train with configs that only the cross-component checks reject."""
    for opts in (
        ("MODEL.LOSSES.NAME", "()"),
        ("SOLVER.AMP.MIN_SCALE", "8", "SOLVER.AMP.MAX_SCALE", "4"),
        ("MODEL.PIXEL_MEAN", "(1, 2)"),
        ("DATASETS.TESTS", "()"),
        ("SOLVER.EMA", "True", "SOLVER.SWA", "True"),
        ("SOLVER.SWA", "True", "SOLVER.SWA.INITIAL_WEIGHT", "0.5", "MODEL.BACKBONE.PRETRAIN", "False"),
        ("SOLVER.IMS_PER_BATCH", "1"),
        ("MODEL.DEVICE", "cuda:9"),
        ("MODEL.META_ARCHITECTURE", "Baselin"),
        ("MODEL.FREEZE_LAYERS", "backbon", "SOLVER.FREEZE_ITERS", "2"),
        ("MODEL.FREEZE_LAYERS", "['backbone', 'heads']", "SOLVER.FREEZE_ITERS", "99"),
        ("LOGGERS", "(tensorboard, wandbb)"),
        ("TRACKING.ARTIFACTS", "model_bset.pth"),
        ("SOLVER.BEST_METRIC", "mAPP"),
        ("SOLVER.BEST_METRIC", "Demo/mAPP"),
        ("TEST.PRECISE_BN", "True", "TEST.PRECISE_BN.DATASET", "Demoo"),
        ("--num-gpus", "0"),
        ("--num-gpus", "2", "--num-machines", "2"),
        ("--dry-run", "--eval-only"),
        ("--eval-only",),
        ("--config-file", "nowhere.yml"),
        ("--plugin", "nowhere.py"),
        ("OUTPUT_DIR", str(record.file("file"))),
        ("OUTPUT_DIR", f"{record.file('file')}/below"),
    ):
        record.train(*opts)


def default_device(record):
    """Set up a run in which MODEL.DEVICE is not set."""
    cfg = get_cfg().with_values({"OUTPUT_DIR": str(record.root / "default_device")})
    with record("default_setup without MODEL.DEVICE"):
        default_setup(cfg)


def trainings(record):
    """Run successful trainings with options that add log lines."""
    folder = record.root / "run"
    options = ("SOLVER.FREEZE_ITERS", "1", "MODEL.FREEZE_LAYERS", "backbone", "SOLVER.EMA", "True",
               "SOLVER.FREEZE_FC_ITERS", "1", "TEST.PRECISE_BN", "True", "TEST.PRECISE_BN.DATASET", "Demo",
               "TEST.EVAL_PERIOD", "1", "DETERMINISTIC", "True", "CUDNN_BENCHMARK", "True")  # fmt: skip
    record.train("OUTPUT_DIR", folder, *options)
    record.train("OUTPUT_DIR", folder)
    record.train("--dry-run", "OUTPUT_DIR", folder)
    record.train("SOLVER.FREEZE_ITERS", "1", "SOLVER.WARMUP_EPOCHS", "1")
    record.train("TEST.BASELINES", "True", "SOLVER.BASE_LR", "1e-6")
    record.train("--seeds", "1", "2", "--resume")
    record.train("--seeds", "1", "1", "--resume")
    link = record.root / "linked"
    link.mkdir()
    (link / "log.txt").symlink_to("/tmp/elsewhere.txt")
    record.train("OUTPUT_DIR", link)


def resumes(record):
    """Use --resume with incompatible run folders."""
    folder = record.root / "run"
    record.train("--resume", "OUTPUT_DIR", folder)
    record.train("--resume", "OUTPUT_DIR", record.root / "new")
    for opts in (
        ("SOLVER.MAX_EPOCH", "2", "SOLVER.IMS_PER_BATCH", "8"),
        ("SOLVER.MAX_EPOCH", "2", "SOLVER.OPT", "SGD"),
        ("SOLVER.MAX_EPOCH", "2", "MODEL.BACKBONE.NAME", "build_plain_backbone"),
        ("SOLVER.MAX_EPOCH", "2", "SOLVER.BASE_LR", "1e-4", "SOLVER.BEST_METRIC", "Rank-1", "SOLVER.AMP", "bf16"),
    ):
        copy = record.root / "resumed"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        record.train("--resume", "OUTPUT_DIR", copy, *opts)
    (folder / "model_final.pth").write_bytes(b"damaged")
    record.train("--resume", "OUTPUT_DIR", folder)


def changed_checkpoints(record):
    """Use --resume with modified checkpoints."""
    folder = record.root / "changed"
    record.train("OUTPUT_DIR", folder, "SOLVER.EMA", "True", "TEST.REPORT", "True")
    good = torch.load(folder / "model_final.pth", weights_only=True)
    trainer = good["trainer"]
    record.train("--resume", "OUTPUT_DIR", folder, "SOLVER.MAX_EPOCH", "2", "SOLVER.CHECKPOINT_PERIOD", "1",
                 "TEST.REPORT", "True")  # fmt: skip
    record.train("--eval-only", "MODEL.WEIGHTS", folder / "model_final.pth", "TEST.REPORT", "True")
    for entry in (
        {"labels_checksum": 1},
        {"processes": 4},
        {"hooks": trainer["hooks"] | {"EvalHook": {"best": {"a": 1}}}},
        {"iteration": -1},
    ):
        torch.save(good | {"trainer": trainer | entry}, folder / "model_final.pth")
        (folder / "last_checkpoint").write_text("model_final.pth")
        record.train("--resume", "OUTPUT_DIR", folder, "SOLVER.EMA", "True", "SOLVER.MAX_EPOCH", "2")


def failures(record):
    """Run trainings that fail after several steps."""
    record.train("SOLVER.BASE_LR", "1e30", "SOLVER.WARMUP_ITERS", "0", "SOLVER.OPT", "SGD", "SOLVER.AMP", "off")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        record.train("SOLVER.CHECKPOINT_PERIOD", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_, **__):
            raise DataError("cannot read the image a.jpg")

        patch.setattr("fastamp.engine.evaluation.inference_on_dataset", fail)
        record.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.engine.reporting.write_report", fail)
        record.train("TEST.REPORT", "True")
    with record("SOLVER.FREEZE_FC_ITERS without a classifier"):
        FreezeClassifier(nn.Linear(1, 1), 3)
    old = record.file("old.yml", "MODEL: {META_ARCHITECTURE: Baseline, HEADS: {NAME: BNneckHead}}\n"
                      "SOLVER: {MAX_ITER: 100}\nDATALOADER: {PK_SAMPLER: True}")  # fmt: skip
    record.train("--config-file", old, "MODEL.DEVICE", "cpu", "DATASETS.NAMES", "x")
    folder = record.root / "locked"
    script = ("import sys; from fastamp.utils.lock import lock_folder\n"
              "lock_folder(sys.argv[1], 'OUTPUT_DIR'); print('locked', flush=True); sys.stdin.read()")  # fmt: skip
    holder = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert holder.stdout.readline() == "locked\n"
        record.train("--eval-only", "MODEL.WEIGHTS", record.root / "resumed/model_best.pth", "OUTPUT_DIR", folder)
    finally:
        holder.communicate()


def several_processes(record):
    """Train with configs that only fail with several processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastamp.utils.comm.get_world_size", lambda: 2)
        for opts in (("MODEL.DEVICE", "cpu:0"), ("MODEL.BACKBONE.NORM", "syncBN"), ("SOLVER.IMS_PER_BATCH", "2")):
            with record(f"2 processes: {' '.join(opts)}"):
                check_config(tiny.tiny_config(record.root / "run", *opts))


def doctor(record):
    """Trigger the messages of `fastamp doctor`."""
    overflow = ("MODEL.BACKBONE.NAME", "build_messages_overflow_backbone", "SOLVER.AMP", "fp16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        record.train("--dtypes", "fp16", "--images", "8", *overflow, program="doctor")
    record.fastamp("doctor", "--env", "MODEL.DEVICE", "cuda")


class Interrupt(HookBase):
    """Send a signal before the first step."""

    def before_step(self):
        signal.raise_signal(signal.SIGTERM)


def interruptions(record):
    """Interrupt trainings by signals and by errors within a step."""
    with record("SIGTERM"):
        trainer = DefaultTrainer(tiny.tiny_config(record.root / "interrupted"))
        trainer.register_hooks([Interrupt()])
        trainer.train()

    class Failing(HookBase):
        def before_forward(self, batch):
            raise ZeroDivisionError("in the step")

        def on_step_error(self, error):
            raise ValueError("in the hook")

    with record("an error in a step and in two hooks"):
        trainer = DefaultTrainer(tiny.tiny_config(record.root / "failing"))
        trainer.register_hooks([Failing(), Failing()])
        trainer.train()


def evaluations(record):
    """Trigger the messages of evaluations with --eval-only."""
    weights = record.root / "resumed/model_best.pth"
    record.train("--eval-only", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", record.root / "evaluated")
    record.train("--eval-only", "MODEL.WEIGHTS", weights, "SOLVER.EMA", "False", "TEST.METRIC", "manhattan")
    record.train("--eval-only", "MODEL.WEIGHTS", weights, "TEST.METRIC", "euclidean", "TEST.AQE", "True",
                 "TEST.RERANK", "True", "TEST.ROC", "True")  # fmt: skip
    record.train("--eval-only", "MODEL.WEIGHTS", record.root / "nowhere.pth")


def preflights(record):
    """Run the pre-flight on faulty models, and replay crash dumps."""
    overflow = ("MODEL.BACKBONE.NAME", "build_messages_overflow_backbone", "SOLVER.AMP", "fp16")
    folder = record.root / "overflow"
    record.train("OUTPUT_DIR", folder, *overflow)
    record.train(*overflow, "SOLVER.AMP.PREFLIGHT", "fallback")
    record.train(*overflow, "SOLVER.AMP.PREFLIGHT", "warn", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2")
    record.train(*overflow, "SOLVER.AMP.PREFLIGHT", "off", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2",
                 "SOLVER.AMP.ON_FAILURE", "bfloat16")  # fmt: skip
    record.train("SOLVER.AMP", "fp16", "MODEL.META_ARCHITECTURE", "MessagesLoud")
    record.train("MODEL.BACKBONE.NAME", "build_messages_rgb_backbone", "INPUT.CHANNELS", "1")
    record.train("MODEL.META_ARCHITECTURE", "MessagesTuple")
    import amp_replay

    crash = folder / "amp_crash"
    for opts in ((), ("SOLVER.AMP", "bf16"), ("MODEL.BACKBONE.NAME", "build_plain_backbone"),
                 ("MODEL.BACKBONE.NAME", "x"), ("SOLVER.AMPP", "bf16")):  # fmt: skip
        record.command(amp_replay.cli, "tools/amp_replay.py", crash, *opts)
    empty = record.root / "empty"
    empty.mkdir()
    torch.save({"model": {}}, record.root / "weights.pth")
    dump = torch.load(next(crash.glob("*.pth")), weights_only=True)
    torch.save({name: value for name, value in dump.items() if name != "rank"}, record.root / "of_another_version.pth")
    for path in (
        empty,
        record.root / "of_another_version.pth",
        record.root / "weights.pth",
        record.file("damaged.pth", "x"),
        record.root / "nowhere",
    ):
        record.command(amp_replay.cli, "tools/amp_replay.py", path)


def precision(record):
    """Check the precision of faulty models, and run `fastamp doctor` with invalid arguments."""
    for title, model, batch, dtype in (
        ("a model for gray images", Net(1), make_batch(3), torch.bfloat16),
        ("NaN in float32", Net(3, gain=float("nan")), make_batch(), torch.float16),
        ("gradients that no loss scale makes finite", Net(3, gain=1e38), make_batch(), torch.float16),
        ("out of memory in float32", Hungry(4, in_low_too=False), make_batch(), torch.bfloat16),
        ("out of memory", Hungry(0, in_low_too=True), make_batch(), torch.bfloat16),
    ):
        with record(f"pre-flight: {title}"):
            report = preflight(model, batch, policy=policy(dtype), scaler=LossScaler())
            record.lines += [f"  {line}" for line in record._normalize(report.problem).split("\n")]
    for argv in (
        ("--dtypes", "int8"),
        ("--batch", "0"),
        ("MODEL.DEVICE", "cuda"),
        ("--config-file", "nowhere.yml"),
    ):
        record.fastamp("doctor", *argv)


def processes(record, patch):
    """Call launch() with invalid process counts and addresses."""
    for numbers in ((0, 1, 0), (1, 2, 2), (1, 2, 0)):
        with record(f"launch(main, {numbers})"):
            launch(print, *numbers)
    with record("a rendezvous that fails"), patch.context() as environment:
        for name, value in {"WORLD_SIZE": "2", "RANK": "7", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}.items():
            environment.setenv(name, value)
        launch(print)
    with patch.context() as environment:
        environment.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
        record.train("DETERMINISTIC", "True")
    with record("DIST_TIMEOUT_MINUTES 5, a process group with another timeout"), patch.context() as group:
        for name, value in {"is_distributed": True, "get_world_size": 2, "get_rank": 0}.items():
            group.setattr(comm, name, lambda value=value: value)
        default_setup(tiny.tiny_config(record.root / "several", "DIST_TIMEOUT_MINUTES", "5"))


def files(record):
    """Use run files that cannot be read or written."""
    with record("SimpleTrainer.load_state_dict of another batch size"):
        model = Net(3)
        trainer = SimpleTrainer(model, [make_batch()] * 2, [torch.optim.SGD(model.parameters(), lr=0.1)],
                                policy=policy(torch.float32))  # fmt: skip
        state = trainer.state_dict()
        trainer.load_state_dict(state | {"iters_per_epoch": 7})
    with record("a dry run into a folder below a file"):
        dry_run(tiny.tiny_config(record.file("plain") / "below"), str(record.root / "dry"))
