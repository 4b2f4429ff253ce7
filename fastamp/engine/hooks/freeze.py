"""Keep parts of the model still at the start of the training, and the classifier at its end."""

import logging
from collections.abc import Sequence

from torch import nn

from fastamp.config import CfgNode
from fastamp.engine.hooks.base import HookBase
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


def freeze_length(cfg: CfgNode, iters_per_epoch: int) -> int:
    """Return how many iterations ``MODEL.FREEZE_LAYERS`` are frozen: ``SOLVER.FREEZE_EPOCHS`` or ``FREEZE_ITERS``."""
    return cfg.SOLVER.FREEZE_EPOCHS * iters_per_epoch or cfg.SOLVER.FREEZE_ITERS


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
        self.trainer.step.set_frozen(self.names if frozen else ())
        verb = f"frozen until iteration {self.iterations}" if frozen else "trained from here on"
        logger.info("%s: %s", ", ".join(self.names), verb)


class FreezeClassifier(HookBase):
    """Freeze the weights of the heads' classifiers during the last iterations, as FastReID's FREEZE_FC_ITERS.

    Whether they are frozen depends on the iteration alone, so that a resumed run continues the same way.

    Args:
        model: the names of its classifiers' parameters are the ``classifiers`` of its heads.
        iterations (int): number of iterations at the end of the training.

    Raises:
        ConfigError: no head of the model names its classifier.
    """

    def __init__(self, model: nn.Module, iterations: int) -> None:
        self._parameters = [
            module.get_parameter(parameter)
            for name, module in model.named_modules()
            if not name.startswith("losses")  # whose weights, e.g. centers, are also shaped by the number of classes
            for parameter in getattr(module, "classifiers", ())
        ]
        if not self._parameters:
            raise ConfigError(
                f"SOLVER.FREEZE_FC_ITERS is {iterations}, but no head of this model names a classifier.\n"
                "  fix: SOLVER.FREEZE_FC_ITERS 0"
            )
        self.iterations = iterations
        self._frozen = False

    def before_step(self) -> None:
        if self._frozen or self.trainer.iter < self.trainer.max_iter - self.iterations:
            return
        self._frozen = True
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        logger.info("the classifier: frozen for the last %d iterations", self.iterations)
