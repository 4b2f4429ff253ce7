"""Losses and miners of pytorch-metric-learning that a config can name; empty if the package is not installed."""

import inspect

from fastamp.modeling.losses.pml import _EXCLUDED

try:
    from pytorch_metric_learning import losses, miners
except ImportError:
    LOSSES, MINERS = [], []
else:
    LOSSES, MINERS = (
        [
            name
            for name, kind in vars(module).items()
            if inspect.isclass(kind) and issubclass(kind, base) and name not in _EXCLUDED
        ]
        for module, base in ((losses, losses.BaseMetricLossFunction), (miners, miners.BaseMiner))
    )


def pml_options(loss: str, miner: str = "") -> list[str]:
    """Return the config options of a loss and a miner."""
    args = "{RankedListLoss: {margin: 0.4, Tn: 10.0}}" if loss == "RankedListLoss" else "{}"
    return [
        "MODEL.LOSSES.NAME", f"('pml/{loss}',)", "MODEL.LOSSES.PML.MINER", miner, "MODEL.LOSSES.PML.ARGS", args
    ]  # fmt: skip
