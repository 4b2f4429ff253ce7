"""Current epoch in the modules of a model."""

from torch import nn

from fastamp.engine.hooks.base import HookBase
from fastamp.modeling.training_state import set_epoch


class SetEpoch(HookBase):
    """Call ``set_epoch(epoch)`` of the modules of a model before each epoch, also after a resume.

    Args:
        model: model with modules that define ``set_epoch``, such as a loss that starts later.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def before_epoch(self) -> None:
        set_epoch(self.model, self.trainer.epoch)
