"""Hooks that freeze layers at the start of training and the classifier at the end."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import ClassDependent
from fastamp.engine.hooks.base import HookBase
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.plural import plural

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)


def freeze_length(cfg: CfgNode, iters_per_epoch: int) -> int:
    """Return the number of iterations during which the layers in ``MODEL.FREEZE_LAYERS`` are frozen."""
    epochs = cfg.SOLVER.MAX_EPOCH if cfg.SOLVER.FREEZE_EPOCHS == -1 else cfg.SOLVER.FREEZE_EPOCHS
    return epochs * iters_per_epoch or cfg.SOLVER.FREEZE_ITERS


class FreezeLayers(HookBase):
    """Freeze modules during the first iterations.

    The parameters of a frozen module receive no gradients, and its submodules are in evaluation mode. If a module in
    ``names`` has submodules, its own ``training`` flag is not changed: for example, the type of a head's output depends
    on this flag. Whether modules are frozen depends only on the iteration, so a resumed run behaves the same.

    Args:
        model: model that contains the modules.
        names: names of the modules, e.g. ``"backbone"``.
        iterations: number of iterations during which the modules are frozen.

    Raises:
        ConfigError: if a module is not found.
    """

    trainer: "SimpleTrainer"

    def __init__(self, model: nn.Module, names: Sequence[str], iterations: int) -> None:
        modules = dict(model.named_modules())
        for name in names:
            if not name or name not in modules:
                raise ConfigError(
                    f"MODEL.FREEZE_LAYERS: module {name!r} not found.{did_you_mean(name, list(modules))}\n"
                    f"  choices: {', '.join(name for name, _ in model.named_children())}, and their submodules"
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
        # Parameters that never train, e.g. the bias of a BNNeck, stay frozen.
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
        verb = f"frozen until iteration {self.iterations}" if frozen else "no longer frozen"
        logger.info("%s: %s", ", ".join(self.names), verb)


class FreezeClassifier(HookBase):
    """Freeze the classifier weights of the heads during the last iterations, like FREEZE_FC_ITERS in FastReID.

    Whether the weights are frozen depends only on the iteration, so a resumed run behaves the same.

    Args:
        model: model whose heads list the names of their classifier parameters in ``classifiers``.
        iterations: number of iterations, at the end of training, during which the classifier is frozen.

    Raises:
        ConfigError: if no head lists a classifier.
    """

    def __init__(self, model: nn.Module, iterations: int) -> None:
        self._parameters = [
            model.get_parameter(f"{name}.{parameter}".removeprefix("."))
            for name, module in model.named_modules()
            # Losses may have weights per class as well, e.g. centers.
            if isinstance(module, ClassDependent) and not name.startswith("losses")
            for parameter in module.classifiers
        ]
        if not self._parameters:
            raise ConfigError(
                f"SOLVER.FREEZE_FC_ITERS is {iterations}, but no head of the model has a classifier.\n"
                "  fix: set SOLVER.FREEZE_FC_ITERS to 0"
            )
        self.iterations = iterations
        self._frozen = False

    def before_step(self) -> None:
        if self._frozen or self.trainer.iter < self.trainer.max_iter - self.iterations:
            return
        self._frozen = True
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        logger.info("the classifier is frozen for the last %s", plural(self.iterations, "iteration"))
