"""Resumed runs are bit-identical to uninterrupted runs."""

import importlib.util
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest
import tiny
import torch

from fastamp.engine import DefaultTrainer, HookBase
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.errors import DataError

HELPERS = Path(__file__).parents[1] / "helpers"


def run(cfg, *hooks, resume=False):
    torch.manual_seed(0)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.trainer.register_hooks(hooks)
    return trainer, trainer.train()


def assert_same_weights(a, b):
    first, second = tiny.weights(a), tiny.weights(b)
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def iterations(output_dir):
    return [json.loads(line)["iteration"] for line in (output_dir / "metrics.json").read_text().splitlines()]


class Interrupt(HookBase):
    """Send a signal to this process in the middle of an epoch."""

    def __init__(self, at, number=signal.SIGTERM):
        self.at, self.number = at, number

    def before_step(self):
        if self.trainer.iter == self.at:
            signal.raise_signal(self.number)


SAMPLERS = ("NaiveIdentitySampler", "BalancedIdentitySampler", "TrainingSampler")
REPRESENTATIVE = ("bf16", "NaiveIdentitySampler")


@pytest.fixture(scope="module")
def uninterrupted_run(demo_root, made_once):
    """Folder of an uninterrupted run of two epochs."""
    with made_once("uninterrupted_run") as (folder, missing), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        if missing:
            run(tiny.tiny_config(folder, "SOLVER.MAX_EPOCH", "2"))
    return folder


@pytest.mark.parametrize(
    ("precision", "sampler"),
    [
        pytest.param(*case, marks=pytest.mark.end_to_end if case == REPRESENTATIVE else pytest.mark.integration)
        for case in itertools.product(("off", "bf16", "fp16"), SAMPLERS)
    ],
)
def test_resume_within_an_epoch_is_bit_identical(demo, tmp_path, precision, sampler):
    options = ("SOLVER.AMP", precision, "DATALOADER.SAMPLER_TRAIN", sampler, "SOLVER.MAX_EPOCH", "2")
    run(tiny.tiny_config(tmp_path / "straight", *options))
    cfg = tiny.tiny_config(tmp_path / "resumed", *options)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingInterrupted) as interruption:
        run(cfg, Interrupt(at=7))
    assert interruption.value.signal_number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert (tmp_path / "resumed/last_checkpoint").read_text() == "model_interrupted.pth"
    trainer, _ = run(cfg, resume=True)
    assert trainer.trainer.start_iter == 8
    assert_same_weights(tmp_path / "straight/model_final.pth", tmp_path / "resumed/model_final.pth")
    assert iterations(tmp_path / "resumed") == iterations(tmp_path / "straight")


OPTIONS = {
    "freezing": ("MODEL.FREEZE_LAYERS", "backbone.0", "SOLVER.FREEZE_ITERS", "9"),
    "freezing that is over": ("MODEL.FREEZE_LAYERS", "backbone", "SOLVER.FREEZE_ITERS", "5"),
    "accumulation": ("SOLVER.ACCUM_STEPS", "2", "SOLVER.IMS_PER_BATCH", "8"),
    "short windows": ("SOLVER.ACCUM_STEPS", "5", "SOLVER.IMS_PER_BATCH", "8"),
    "clipping by value": ("SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "value"),
    "clipping by norm": ("SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE", "0.1"),
    "clipping by global norm": ("SOLVER.CLIP_GRADIENTS", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "global_norm"),
    "EMA": ("SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.DECAY", "0.9"),
    "SWA": ("SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "0", "SOLVER.SWA.LR_FACTOR", "0.5"),
    "SWA with initial weights": (
        "SOLVER.SWA.ENABLED", "True", "SOLVER.SWA.START_EPOCH", "1", "SOLVER.SWA.INITIAL_WEIGHT", "0.4",
        "MODEL.BACKBONE.PRETRAIN", "True",
    ),
    "precise batch norm": (
        "TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.DATASET", "Demo", "TEST.PRECISE_BN.NUM_ITER", "3",
        "TEST.EVAL_PERIOD", "1",
    ),
    "layer-wise rates": ("SOLVER.LR_FACTORS", "{'backbone.*': 0.5}"),
    "AutoAugment and affine": (
        "INPUT.AUTOAUG.ENABLED", "True", "INPUT.AUTOAUG.PROB", "0.5", "INPUT.AFFINE.ENABLED", "True",
    ),
    "every augmentation, on the device": (
        "INPUT.AUGMENT_ON", "device", "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(64, 32)", "INPUT.CJ", "True",
        "INPUT.GRAYSCALE", "True", "INPUT.BLUR", "True", "INPUT.RANDAUG", "True", "INPUT.LOCAL_GRAYSCALE", "True",
        "INPUT.RPT", "True", "INPUT.AUGMIX", "True", "INPUT.AUGMIX.PROB", "0.5",
    ),
    "a cache": ("DATALOADER.CACHE", "ram"),
    "identities equally often": ("DATALOADER.SAMPLER_TRAIN", "ImbalancedDatasetSampler"),
    "sets by weight": ("DATALOADER.SAMPLER_TRAIN", "SetReWeightSampler", "DATALOADER.SET_WEIGHT", "(1,)"),
    "margin softmax and more losses": (
        "MODEL.HEADS.CLS_LAYER", "CircleSoftmax", "MODEL.HEADS.SCALE", "32", "MODEL.HEADS.MARGIN", "0.3",
        "MODEL.HEADS.POOL_LAYER", "GeneralizedMeanPoolingP",
        "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'CircleLoss', 'Cosface', 'FocalLoss')",
    ),
    "center loss": ("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'CenterLoss')", "MODEL.LOSSES.CENTER.LR", "0.3"),
    "MoCo": ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "40", "SOLVER.EMA.ENABLED", "True"),
    "Distiller": ("MODEL.META_ARCHITECTURE", "Distiller", "KD.EMA.ENABLED", "True", "KD.EMA.MOMENTUM", "0.8"),
    **{name: ("SOLVER.OPT", name) for name in ("AdamW", "SGD", "RAdam", "NAdam", "LAMB")},
    **{name: ("SOLVER.SCHED", name) for name in ("CosineAnnealingLR", "ConstantLR", "OneCycleLR")},
}  # fmt: skip


# Pairs of independent options, tested in one run.
PAIRS = [
    ("freezing", "clipping by value"), ("freezing that is over", "AdamW"), ("accumulation", "clipping by norm"),
    ("short windows", "identities equally often"), ("clipping by global norm", "CosineAnnealingLR"),
    ("EMA", "every augmentation, on the device"), ("SWA", "layer-wise rates"), ("precise batch norm", "RAdam"),
    ("SWA with initial weights",),
    ("AutoAugment and affine", "a cache"), ("sets by weight", "SGD"), ("margin softmax and more losses", "NAdam"),
    ("center loss", "LAMB"), ("MoCo", "ConstantLR"), ("Distiller", "OneCycleLR"),
]  # fmt: skip


def test_option_pairs_contain_every_option_once():
    assert sorted(name for pair in PAIRS for name in pair) == sorted(OPTIONS)


@pytest.mark.integration
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("precision", ["off", "fp16"])
def test_resume_is_bit_identical_with_each_pair_of_options(demo, tmp_path, pair, precision):
    has_timm = importlib.util.find_spec("timm") is not None
    names = [name for name in pair if name != "LAMB" or has_timm]
    options = ("SOLVER.AMP", precision, "SOLVER.MAX_EPOCH", "2", *(word for name in names for word in OPTIONS[name]))
    straight, _ = run(tiny.tiny_config(tmp_path / "straight", *options))
    cfg = tiny.tiny_config(tmp_path / "resumed", *options)
    # Not the last iteration of an epoch: the run would be interrupted after the evaluation.
    at = 1 if "short windows" in names else 7
    with pytest.raises(TrainingInterrupted):
        run(cfg, Interrupt(at=at))
    trainer, _ = run(cfg, resume=True)
    assert trainer.trainer.start_iter == at + 1 < straight.trainer.max_iter
    assert_same_weights(tmp_path / "straight/model_final.pth", tmp_path / "resumed/model_final.pth")
    assert iterations(tmp_path / "resumed") == iterations(tmp_path / "straight")
    first, second = (
        torch.load(tmp_path / f"{which}/model_final.pth", weights_only=True) for which in ("straight", "resumed")
    )
    if "average" in first:
        assert all(torch.equal(t, second["average"]["model"][key]) for key, t in first["average"]["model"].items())
    # Learning rates, and the state of the optimizer per group and per parameter.
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys()
    for key, state in first["optimizer"]["state"].items():
        torch.testing.assert_close(state, second["optimizer"]["state"][key], rtol=0, atol=0)
    assert first["optimizer"]["param_groups"] == second["optimizer"]["param_groups"]


MUCH = (
    "SOLVER.ACCUM_STEPS", "2", "SOLVER.IMS_PER_BATCH", "8", "SOLVER.EMA.ENABLED", "True", "SOLVER.EMA.DECAY", "0.9",
    "MODEL.FREEZE_LAYERS", "backbone.0", "SOLVER.FREEZE_ITERS", "9", "SOLVER.AMP.GROWTH_INTERVAL", "3",
    "MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "40",
)  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["off", "fp16"])
def test_resume_after_simulated_kill_within_an_epoch_is_bit_identical(demo, tmp_path, precision):
    """The iterations between the checkpoint and the kill are repeated with the same results."""
    options = ("SOLVER.AMP", precision, "SOLVER.MAX_EPOCH", "2", *MUCH)
    run(tiny.tiny_config(tmp_path / "straight", *options))
    cfg = tiny.tiny_config(
        tmp_path / "resumed", *options, "SOLVER.CHECKPOINT_ITERS", "4", "SOLVER.CHECKPOINT_KEEP", "2"
    )
    with pytest.raises(tiny.Stopped):
        run(cfg, tiny.StopAt(11))
    assert (tmp_path / "resumed/last_checkpoint").read_text() == "model_iter_0000008.pth"
    trainer, _ = run(cfg, resume=True)
    assert trainer.trainer.start_iter == 8 and trainer.trainer.iters_per_epoch == 6
    assert_same_weights(tmp_path / "straight/model_final.pth", tmp_path / "resumed/model_final.pth")
    assert iterations(tmp_path / "resumed") == iterations(tmp_path / "straight")
    first, second = (
        torch.load(tmp_path / f"{which}/model_final.pth", weights_only=True) for which in ("straight", "resumed")
    )
    assert all(torch.equal(t, second["average"]["model"][key]) for key, t in first["average"]["model"].items())
    assert first["trainer"]["step"] == second["trainer"]["step"]  # includes the loss scale


@pytest.mark.integration
def test_resume_skips_damaged_checkpoints_and_uses_an_older_one(demo, tmp_path, caplog, uninterrupted_run):
    """The newest checkpoint is truncated, the second newest is corrupt, and the run resumes from the third newest."""
    logging.getLogger("fastamp").setLevel(logging.INFO)
    options = ("SOLVER.MAX_EPOCH", "2", "SOLVER.CHECKPOINT_ITERS", "2")
    with pytest.raises(tiny.Stopped):
        run(tiny.tiny_config(tmp_path / "resumed", *options), tiny.StopAt(9))
    names = ("model_iter_0000008", "model_0000", "model_iter_0000004")
    newest, second, third = (tmp_path / f"resumed/{name}.pth" for name in names)
    newest.write_bytes(newest.read_bytes()[:-1000])
    content = bytearray(second.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 1000] = bytes(1000)
    second.write_bytes(content)
    changed = tiny.tiny_config(tmp_path / "resumed", *options, "SOLVER.CHECKPOINT_KEEP", "1", "LOG_PERIOD", "4")
    trainer, _ = run(changed, resume=True)
    assert trainer.trainer.start_iter == 4
    for part in ("model_iter_0000008.pth", "truncated", "model_0000.pth", "checksum", f"using {third}"):
        assert part in caplog.text
    assert f"resuming from {third}, saved after iteration 4" in caplog.text
    differ = [line.split(": ", 1)[1] for line in caplog.messages if "config differs" in line]
    assert sorted(differ) == ["LOG_PERIOD: 2 -> 4", "SOLVER.CHECKPOINT_KEEP: 0 -> 1"]
    assert_same_weights(uninterrupted_run / "model_final.pth", tmp_path / "resumed/model_final.pth")


@pytest.mark.integration
def test_resume_with_changed_random_state_gives_different_weights(demo, tmp_path, uninterrupted_run):
    """Negative control: the dropout masks depend on the random state in the checkpoint."""
    cfg = tiny.tiny_config(tmp_path / "resumed", "SOLVER.MAX_EPOCH", "2")
    with pytest.raises(TrainingInterrupted):
        run(cfg, Interrupt(at=7))
    path = tmp_path / "resumed/model_interrupted.pth"
    content = torch.load(path, weights_only=True)
    content["random"]["torch"] = torch.Generator().manual_seed(1).get_state()
    torch.save(content, path)
    run(cfg, resume=True)
    with pytest.raises(AssertionError):
        assert_same_weights(uninterrupted_run / "model_final.pth", tmp_path / "resumed/model_final.pth")


@pytest.mark.integration
def test_resume_keeps_the_best_score_and_best_model(demo, tmp_path):
    cfg = tiny.tiny_config(tmp_path, "TEST.EVAL_PERIOD", "1", "SOLVER.MAX_EPOCH", "2")
    with pytest.raises(TrainingInterrupted):
        run(cfg, Interrupt(at=7))
    path = tmp_path / "model_interrupted.pth"
    content = torch.load(path, weights_only=True)
    content["trainer"]["hooks"]["EvalHook"]["best"] = 1000.0
    torch.save(content, path)
    best = (tmp_path / "model_best.pth").read_bytes()
    trainer, _ = run(cfg, resume=True)
    assert trainer.eval_hook.best == 1000.0
    assert (tmp_path / "model_best.pth").read_bytes() == best


@pytest.mark.integration
def test_resume_without_a_checkpoint_starts_from_the_beginning(demo, tmp_path):
    trainer, results = run(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "1"), resume=True)
    assert trainer.trainer.start_iter == 0 and results["mAP"] > 0


@pytest.mark.integration
def test_resuming_a_complete_run_keeps_the_final_weights(demo, tmp_path):
    cfg = tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "1")
    run(cfg)
    before = tiny.weights(tmp_path / "model_final.pth")
    run(cfg, resume=True)
    after = tiny.weights(tmp_path / "model_final.pth")
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.integration
def test_resume_repeats_a_failed_last_evaluation(demo, tmp_path):
    straight, cfg = (tiny.tiny_config(tmp_path / name, "SOLVER.MAX_EPOCH", "1") for name in ("straight", "failed"))
    trainer, results = run(straight)
    torch.manual_seed(0)
    failed = DefaultTrainer(cfg)

    def evaluate():
        raise DataError("a test image is gone")

    failed.eval_hook.evaluate = evaluate
    with pytest.raises(DataError):
        failed.train()
    assert not list((tmp_path / "failed").glob("model_[bf]*"))
    resumed, again = run(cfg, resume=True)
    assert again["mAP"] == results["mAP"] and resumed.eval_hook.best == trainer.eval_hook.best
    assert (tmp_path / "failed/last_checkpoint").read_text() == "model_final.pth"
    assert '"Demo/mAP"' in (tmp_path / "failed/metrics.json").read_text()
    for name in ("model_best.pth", "model_final.pth"):
        one, two = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("straight", "failed"))
        assert all(torch.equal(value, two["model"][key]) for key, value in one["model"].items())
        assert one["trainer"] == two["trainer"]


def killable(output_dir, moment, root):
    return preloaded.run(HELPERS / "killable_run.py", output_dir, moment, FASTAMP_DATASETS=str(root))


@pytest.fixture(scope="module")
def uninterrupted_process(demo_root, made_once):
    """Folder of an uninterrupted run in a new process, whose hash seed differs from that of the killed run."""
    with made_once("uninterrupted_process") as (folder, missing):
        if missing:
            env = os.environ | {"FASTAMP_DATASETS": str(demo_root), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(HELPERS / "killable_run.py"), str(folder), "never"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("moment", ["step", "save", "evaluation"])
def test_resume_in_new_process_after_sigkill_is_bit_identical(demo_root, tmp_path, uninterrupted_process, moment):
    killed = killable(tmp_path, moment, demo_root)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "model_final.pth").exists()
    resumed = killable(tmp_path, "never", demo_root)
    assert resumed.returncode == 0, resumed.stderr
    start = {"step": 15, "save": 6, "evaluation": 10}[moment]
    assert "resuming from" in resumed.stdout and f"after iteration {start}" in resumed.stdout
    assert_same_weights(uninterrupted_process / "model_final.pth", tmp_path / "model_final.pth")
    assert iterations(tmp_path) == iterations(uninterrupted_process)
    names = {"model_best.pth", "model_final.pth", "model_0002.pth", "model_iter_0000020.pth"}
    assert {path.name for path in tmp_path.glob("*model_*")} == names  # no partial files
