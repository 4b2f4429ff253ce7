"""Constructor of FastReID's heads."""

import functools
from collections.abc import Callable
from typing import Any

from fastamp.compat.config import is_called_with_config


def accepts_config(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate ``__init__`` of a head so that a subclass written for FastReID can call ``super().__init__(cfg)``.

    The arguments are those of the classmethod ``config_arguments(cfg)``. The classification layer of such a head can
    also be called as in FastReID, ``cls_layer(logits, targets)``.
    """

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_called_with_config(args, kwargs):
            init(self, *args, **kwargs)
            return
        from fastamp.compat import any_softmax

        init(self, **self.config_arguments(*args, **kwargs))
        layer = getattr(any_softmax, type(self.cls_layer).__name__, None)
        if layer is not None:
            self.cls_layer = layer(len(self.weight), self.cls_layer.scale, self.cls_layer.margin)

    return construct
