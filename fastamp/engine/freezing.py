"""Keep parts of the model still at the start of the training."""

import logging
from collections.abc import Sequence

from torch import nn

from fastamp.engine.train_loop import HookBase
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


class FreezeLayers(HookBase):
    """Freeze modules during the first iterations: no gradient for their parameters, evaluation mode for all in them.

    A module that has parts keeps its own mode, by which a head, for one, decides what it returns. Whether they are
    frozen follows from the iteration alone, so that a resumed run goes on where it was.

    Args:
        model: has the modules.
        names: of the modules, e.g. ``"backbone"``.
        iterations: how many.

    Raises:
        ConfigError: the model has no module of that name.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], iterations: int) -> None:
        modules = dict(model.named_modules())
        for name in names:
            if not name or name not in modules:
                raise ConfigError(
                    f"MODEL.FREEZE_LAYERS: the model has no part {name!r}.{did_you_mean(name, list(modules))}\n"
                    f"  its parts: {', '.join(name for name, _ in model.named_children())}"
                )
        chosen = [modules[name] for name in names]
        self._parts = [
            part
            for module in chosen
            for part in module.modules()
            if part is not module or next(module.children(), None) is None
        ]
        self.names = list(names)
        self.iterations = iterations
        # Those that are meant to stand still for ever, like the bias of a BNNeck, are not ours to release.
        self._parameters = {id(p): p for module in chosen for p in module.parameters() if p.requires_grad}.values()
        self._frozen = False

    def before_step(self) -> None:
        frozen = self.trainer.iter < self.iterations
        if frozen == self._frozen:
            return
        self._frozen = frozen
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)
        for part in self._parts:
            part.training = not frozen
        self.trainer.step.frozen = self.names if frozen else ()
        verb = f"frozen until iteration {self.iterations}" if frozen else "trained from here on"
        logger.info("%s: %s", ", ".join(self.names), verb)
