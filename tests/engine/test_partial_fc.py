"""Runs with Partial FC: resume, other numbers of processes, plain heads and evaluation."""

from pathlib import Path

import preloaded
import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastamp.amp import OptimizationStep
from fastamp.diagnostics.crash import CrashDump
from fastamp.engine import DefaultTrainer
from fastamp.inference import Predictor
from fastamp.modeling import build_model
from fastamp.modeling.heads import EmbeddingHead
from fastamp.utils.errors import ConfigError

HELPERS = Path(__file__).parents[1] / "helpers"
PFC = ("MODEL.HEADS.PFC.ENABLED", "True", "MODEL.HEADS.CLS_LAYER", "CosSoftmax", "MODEL.HEADS.SCALE", "16")
SHORT = ("SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1")
SAMPLED = (*PFC, "MODEL.HEADS.PFC.SAMPLE_RATE", "0.4", *SHORT)
PLAIN = (*PFC, *SHORT, "MODEL.HEADS.PFC.ENABLED", "False")
FULL = (*PFC, "MODEL.HEADS.PFC.SAMPLE_RATE", "1", *SHORT)


def run(root, output, processes, *words, flags=()):
    """Run ``ranks.py`` with the given number of processes and return the completed process."""
    return preloaded.run(HELPERS / "ranks.py", *flags, output, processes, *words, FASTAMP_DATASETS=str(root))


def content(folder: Path, name: str = "model_final.pth") -> dict:
    return torch.load(folder / name, weights_only=True)


def assert_equal_state(first: dict, second: dict) -> None:
    """Compare weights, weight average, optimizer state and sampling bit for bit."""
    pairs = [(first["model"], second["model"])]
    if "average" in first:
        pairs.append((first["average"]["model"], second["average"]["model"]))
    pairs += [(state, second["optimizer"]["state"][key]) for key, state in first["optimizer"]["state"].items()]
    for one, other in pairs:
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert first["sampling"] == second["sampling"]


@pytest.mark.integration
@pytest.mark.parametrize("processes", [1, 2])
def test_resume_is_bit_identical(demo_root, tmp_path, processes):
    options = (*SAMPLED, "SOLVER.AMP", "bf16", "SOLVER.EMA.ENABLED", "True")
    assert run(demo_root, tmp_path / "straight", processes, *options).returncode == 0
    rank = processes - 1
    stopped = run(demo_root, tmp_path / "resumed", processes, *options, flags=("--fault", f"signal on rank {rank}"))
    assert stopped.returncode == 128 + 15, stopped.stderr
    resumed = run(demo_root, tmp_path / "resumed", processes, *options, flags=("--resume",))
    assert resumed.returncode == 0 and "after iteration 3" in resumed.stdout, resumed.stderr
    straight = content(tmp_path / "straight")
    assert_equal_state(straight, content(tmp_path / "resumed"))
    assert straight["model"]["heads.weight"].shape == (16, tiny.WIDTH)
    assert straight["sampling"] == {"heads.partial_fc": straight["trainer"]["iteration"]}


@pytest.mark.integration
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_run_continues_in_another_number_of_processes(demo_root, tmp_path, before, now):
    options = (*tiny.PLAIN, *FULL, "SOLVER.BASE_LR", "0.05", "SOLVER.AMP", "off")
    assert run(demo_root, tmp_path / "straight", 1, *options).returncode == 0
    flags = ("--fault", f"signal on rank {before - 1}")
    assert run(demo_root, tmp_path / "resumed", before, *options, flags=flags).returncode == 128 + 15
    resumed = run(demo_root, tmp_path / "resumed", now, *options, flags=("--resume",))
    assert resumed.returncode == 0, resumed.stderr
    straight, other = (content(tmp_path / name)["model"] for name in ("straight", "resumed"))
    if before == 1:  # two processes would start with other centers
        for name, value in straight.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)
    assert straight.keys() == other.keys() and other["heads.weight"].shape == (16, tiny.WIDTH)


@pytest.mark.integration
def test_rate_1_trains_as_the_ordinary_head_and_their_weights_fit_each_other(demo, tmp_path):
    runs = {}
    for name, options in (("full", FULL), ("plain", PLAIN)):
        torch.manual_seed(0)
        tiny.train(tmp_path / name, *options, "SOLVER.AMP", "off")
        runs[name] = content(tmp_path / name)
    for key, value in runs["plain"]["model"].items():
        assert torch.equal(runs["full"]["model"][key], value), key
    assert "sampling" not in runs["plain"]
    for options, file in ((FULL, "plain"), (PLAIN, "full")):
        weights = ("MODEL.WEIGHTS", str(tmp_path / file / "model_final.pth"))
        trainer = DefaultTrainer(tiny.tiny_config(tmp_path / "new", *options, *weights))
        trainer.resume_or_load(resume=False)
        assert torch.equal(trainer.model.heads.weight.cpu(), runs[file]["model"]["heads.weight"])
    plain = tiny.tiny_config(tmp_path / "full", *PLAIN, "SOLVER.MAX_EPOCH", "2")
    trainer = DefaultTrainer(plain)  # an ordinary head resumes the run
    trainer.resume_or_load(resume=True)
    assert trainer.trainer.start_iter == runs["full"]["trainer"]["iteration"]


@pytest.mark.integration
def test_evaluation_needs_no_centers(demo, tmp_path):
    tiny.train(tmp_path, *SAMPLED)
    state = content(tmp_path)["model"]
    expected = Predictor(tmp_path / "model_final.pth")
    images = torch.randint(256, (2, 3, 64, 32)).float()
    file = tmp_path / "without.pth"
    torch.save({"model": {name: value for name, value in state.items() if name != "heads.weight"}}, file)
    cfg = tiny.tiny_config(tmp_path / "eval", *SAMPLED, "MODEL.WEIGHTS", str(file))
    model, _ = DefaultTrainer.load_model(cfg)
    model.eval(), expected.model.eval()
    assert torch.equal(model(images), expected.model(images))
    assert len(model.heads.weight) == 0


@pytest.mark.parametrize(
    "words",
    [
        ("MODEL.LOSSES.CE.EPSILON", "0.1"),
        ("MODEL.LOSSES.NAME", "FocalLoss"),
        (
            "MODEL.META_ARCHITECTURE",
            "MGN",
            "MODEL.BACKBONE.NAME",
            "build_resnet_backbone",
            "MODEL.BACKBONE.DEPTH",
            "18x",
        ),
        ("MODEL.META_ARCHITECTURE", "MoCo"),
        ("SOLVER.OPT", "Adafactor"),
    ],
)
def test_unsupported_combinations(demo, tmp_path, words):
    if "MGN" in words:
        words = (*words, "MODEL.BACKBONE.FEAT_DIM", "512")
    with pytest.raises(ConfigError, match=r"HEADS\.PFC"):
        DefaultTrainer(tiny.tiny_config(tmp_path, *SAMPLED, *words))


@pytest.mark.integration
def test_crash_dump_of_one_of_two_processes_can_be_replayed(demo_root, demo, tmp_path):
    options = (*SAMPLED, "SOLVER.AMP", "off", "SOLVER.AMP.MAX_CONSECUTIVE_SKIPS", "2")
    process = run(demo_root, tmp_path, 2, *options, flags=("--fault", "infinite images on rank 1"))
    assert process.returncode == 2, process.stderr
    assert "batch not finite" in process.stderr and "Could not run" not in process.stderr
    crash = CrashDump.read(next(iter(tmp_path.glob("amp_crash/*_rank_1.pth"))))
    assert crash.sharded == ["heads.weight"] and crash.model["heads.weight"].shape == (8, tiny.WIDTH)
    model = build_model(tiny.tiny_config(tmp_path, *options, "MODEL.HEADS.NUM_CLASSES", "16"))
    crash.restore(model)
    assert torch.equal(model.heads.weight, crash.model["heads.weight"])
    assert (model.heads.partial_fc.start, model.heads.partial_fc.count) == (8, 8)
    batch = {"images": torch.rand(4, 3, 64, 32), "targets": torch.arange(7, 11)}
    assert all(loss.isfinite() for loss in model(batch).values())


class LargeTensors(TorchDispatchMode):
    """Record the operations whose result has at least ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.found = rows, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.dim()
            if dense and len(tensor) >= self.rows:
                self.found.append(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("rate", [0.005, 1.0])
def test_step_of_sampled_centers_has_no_operation_on_all_centers(optimizer, rate):
    options = {"lr": 0.1, "weight_decay": 5e-4} | ({"momentum": 0.9} if optimizer == "SGD" else {})
    head = EmbeddingHead(
        feat_dim=4,
        num_classes=2000,
        cls_layer="ArcSoftmax",
        scale=64,
        margin=0.5,
        pool_layer="Identity",
        sample_rate=rate,
    )
    backbone = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleList([backbone, head])
    step = OptimizationStep(model, [getattr(torch.optim, optimizer)(model.parameters(), **options)])

    def train() -> None:
        step.zero_grad()
        targets = torch.tensor([3, 3, 1999, 70])
        outputs = head(backbone(torch.randn(4, 4))[:, :, None, None], targets)
        step.scale({"loss_cls": outputs["cls_outputs"].cross_entropy()}).backward()
        step.finish()

    train()  # the first step creates the momentum or the moments
    with LargeTensors(1000) as large:
        train()
    found = {name for name in large.found if name not in ("index_copy_", "detach", "alias")}
    # index_copy_ returns the parameter or its state, of which it writes the sampled rows only.
    assert bool(found) == (rate == 1), found
