"""Scheduled events that a run does not reach."""

from pathlib import Path

import pytest
import tiny

from fastamp.config import get_cfg, read_config
from fastamp.engine import DefaultTrainer
from fastamp.engine.unreached import find_unreached_events

ROOT = Path(__file__).parents[2]
LENGTH = {"SOLVER.MAX_EPOCH": 4, "SOLVER.WARMUP_ITERS": 0, "SOLVER.STEPS": (), "TEST.EVAL_PERIOD": 4}
LENGTH |= {"SOLVER.CHECKPOINT_PERIOD": 4, "LOG_PERIOD": 10}
COSINE = {"SOLVER.SCHED": "CosineAnnealingLR"}
FREEZE = {"MODEL.FREEZE_LAYERS": ["backbone"]}
SWA = {"SOLVER.SWA.ENABLED": True}
RAMP = {"SOLVER.SCHED": "RampedExponentialLR"}
CAL = {"MODEL.LOSSES.NAME": ["ClothesAdversarialLoss"]}


def keys_of(values, iters_per_epoch=10):
    """Return the keys of the events that a run of 40 iterations does not reach."""
    events = find_unreached_events(get_cfg().with_values(LENGTH | values), iters_per_epoch)
    return [event.split()[0] for event in events]


@pytest.mark.parametrize(
    ("first", "late", "others"),
    [
        ({"SOLVER.WARMUP_ITERS": 39}, {"SOLVER.WARMUP_ITERS": 40}, {}),
        ({"SOLVER.WARMUP_EPOCHS": 3}, {"SOLVER.WARMUP_EPOCHS": 4}, {}),
        ({"SOLVER.WARMUP_EPOCHS": 3}, {"SOLVER.WARMUP_EPOCHS": 4}, RAMP),
        ({"SOLVER.WARMUP_EPOCHS": 6}, {"SOLVER.WARMUP_EPOCHS": 8}, RAMP | {"SOLVER.SCHEDULE_STRIDE": 2}),
        ({"SOLVER.STEPS": [3]}, {"SOLVER.STEPS": [3, 4]}, {}),
        ({"SOLVER.STEPS": [2]}, {"SOLVER.STEPS": [3]}, {"SOLVER.WARMUP_ITERS": 20}),  # counted from the warm-up
        ({"SOLVER.STEPS": [2]}, {"SOLVER.STEPS": [2, 3]}, {"SOLVER.DELAY_EPOCHS": 1}),
        ({"SOLVER.DELAY_EPOCHS": 3}, {"SOLVER.DELAY_EPOCHS": 4}, COSINE),
        ({"SOLVER.FREEZE_ITERS": 39}, {"SOLVER.FREEZE_ITERS": 40}, FREEZE),
        ({"SOLVER.FREEZE_EPOCHS": 3}, {"SOLVER.FREEZE_EPOCHS": 4}, FREEZE),
        ({"SOLVER.FREEZE_EPOCHS": -1}, {"SOLVER.FREEZE_EPOCHS": 1000}, FREEZE),
        ({"SOLVER.FREEZE_FC_ITERS": 39}, {"SOLVER.FREEZE_FC_ITERS": 40}, {}),
        ({"SOLVER.SWA.START_EPOCH": 3}, {"SOLVER.SWA.START_EPOCH": 4}, SWA),
        ({"SOLVER.SWA.START_EPOCH": -1}, {"SOLVER.SWA.START_EPOCH": 9}, SWA | {"SOLVER.SWA.LR_FACTOR": 0.5}),
        ({"MODEL.LOSSES.CAL.START_EPOCH": 3}, {"MODEL.LOSSES.CAL.START_EPOCH": 4}, CAL),
        ({"TEST.EVAL_PERIOD": 4}, {"TEST.EVAL_PERIOD": 5}, {}),
        ({"SOLVER.CHECKPOINT_PERIOD": 4}, {"SOLVER.CHECKPOINT_PERIOD": 5}, {}),
        ({"SOLVER.CHECKPOINT_ITERS": 40}, {"SOLVER.CHECKPOINT_ITERS": 41}, {}),
        ({"LOG_PERIOD": 40}, {"LOG_PERIOD": 41}, {}),
    ],
)
def test_only_events_after_the_end_are_listed(first, late, others):
    assert keys_of(others | first) == []
    assert keys_of(others | late) == list(late)


def test_keys_without_effect_are_not_listed():
    assert keys_of({"SOLVER.FREEZE_ITERS": 100, "MODEL.LOSSES.CAL.START_EPOCH": 100}) == []
    assert keys_of({"SOLVER.SWA.START_EPOCH": 100, "SOLVER.STEPS": [100], **COSINE}) == []
    assert keys_of({"SOLVER.WARMUP_ITERS": 100, "SOLVER.SCHED": "OneCycleLR"}) == []


# Published numbers of training images; for video, tracklets x 4 frames.
IMAGES = {"Market1501": 12936, "DukeMTMC": 16522, "MSMT17": 30248, "VeRi": 37746, "VehicleID": 110178}
IMAGES |= {"VeRiWild": 277797, "MARS": 33192, "DukeMTMCVideo": 8784, "csv:wildlife/split.csv": 13000}
FEWEST = 1000  # images, at least, in the other training sets


def iterations(cfg):
    """Return the iterations of an epoch on the training sets of a recipe."""
    images = sum(IMAGES.get(name, FEWEST) for name in cfg.DATASETS.NAMES)
    return images // (cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUM_STEPS)


@pytest.mark.integration
def test_recipes_reach_all_their_events():
    unreached = {}
    paths = sorted((ROOT / "configs").glob("*/*.yml"))
    for path in paths:
        cfg = read_config(path)
        if events := find_unreached_events(cfg, iterations(cfg)):
            unreached[str(path.relative_to(ROOT))] = events
    assert len(paths) > 100 and unreached == {}


def test_training_warns_at_its_start(demo, tmp_path, caplog):
    options = ("MODEL.FREEZE_LAYERS", "backbone", "SOLVER.FREEZE_ITERS", "1000", "SOLVER.SWA.ENABLED", "False")
    DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    [warning] = [record.getMessage() for record in caplog.records if "SOLVER.FREEZE_ITERS 1000" in record.getMessage()]
    assert "backbone" in warning and "fix:" in warning and "small_set" in warning
