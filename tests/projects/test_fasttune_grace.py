"""Grace period of FastTune: no trial is stopped before warm-up and freezing end."""

import pytest
from autotuner.space import IDENTITIES, Parameter, Space
from tune_net import grace_epochs

from fastamp.config import get_cfg

MARGIN = Parameter("MODEL.LOSSES.TRI.MARGIN", "uniform", (0.0, 0.5))


@pytest.mark.parametrize(
    "parameters, options, epochs",
    [
        ([MARGIN], [], 4),  # 100 images, 10 steps per epoch, 35 warm-up steps
        ([MARGIN], ["SOLVER.WARMUP_ITERS", 0], 0),
        ([MARGIN], ["SOLVER.ACCUM_STEPS", 2], 7),
        ([MARGIN], ["SOLVER.FREEZE_ITERS", 51], 4),
        ([MARGIN], ["SOLVER.FREEZE_ITERS", 51, "MODEL.FREEZE_LAYERS", ("backbone",)], 6),
        ([MARGIN], ["SOLVER.WARMUP_EPOCHS", 2], 2),  # overrides the iterations
        ([Parameter("SOLVER.WARMUP_EPOCHS", "choice", (0, 3))], [], 4),
        ([MARGIN], ["SOLVER.FREEZE_EPOCHS", 7, "MODEL.FREEZE_LAYERS", ("backbone",)], 7),
        ([Parameter("SOLVER.WARMUP_ITERS", "quniform", (0, 60, 20))], [], 6),
        ([MARGIN], ["SOLVER.WARMUP_EPOCHS", 2], 2),
        ([Parameter("SOLVER.WARMUP_EPOCHS", "randint", (0, 3))], [], 4),  # with 0, the iterations count
        ([MARGIN], ["SOLVER.FREEZE_EPOCHS", 9, "MODEL.FREEZE_LAYERS", ("backbone",)], 9),
        ([Parameter(IDENTITIES, "randint", (2, 6))], [], 7),  # at most 5 x 4 images
        ([Parameter(IDENTITIES, "randint", (2, 6)), Parameter("DATALOADER.NUM_INSTANCE", "choice", (2, 8))], [], 18),
        ([Parameter("SOLVER.IMS_PER_BATCH", "choice", (8, 46))], [], 18),
    ],
)
def test_fasttune_grace_epochs_cover_warmup_and_freezing_of_every_sample(parameters, options, epochs):
    cfg = get_cfg()
    base = ["SOLVER.IMS_PER_BATCH", 10, "SOLVER.WARMUP_ITERS", 35, "DATALOADER.NUM_INSTANCE", 4]
    cfg.merge_from_list([*base, *options])
    assert grace_epochs(cfg, Space(parameters), 100) == epochs
