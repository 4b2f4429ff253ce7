"""Constructor of FastReID's heads."""

import functools
from collections.abc import Callable
from typing import Any

from fastamp.fastreid.config_names import configurable


def accepts_config(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of a head for subclasses written for FastReID.

    Such a subclass may call ``super().__init__(cfg)``, and its classification layer can also be called as in FastReID,
    ``cls_layer(logits, targets)``.
    """
    configured = configurable(init)

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        configured(self, *args, **kwargs)
        if type(self).__module__.partition(".")[0] == "fastamp":
            return
        from fastamp.fastreid import any_softmax

        layer = getattr(any_softmax, type(self.cls_layer).__name__, None)
        if layer is not None:
            self.cls_layer = layer(len(self.weight), self.cls_layer.scale, self.cls_layer.margin)

    return construct
