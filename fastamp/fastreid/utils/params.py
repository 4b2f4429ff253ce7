"""FastReID's flat parameter buffer."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


class ContiguousParams:
    """Replacement for FastReID's flat parameter buffer: keeps the parameters as they are.

    With PyTorch 2, training on a flat buffer does not change the weights, because ``zero_grad`` releases the gradients
    that the buffer refers to. The foreach and fused optimizers are as fast without it.

    Args:
        parameters: parameters, or groups of parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter | dict[str, Any]]) -> None:
        warnings.warn(
            f"{type(self).__name__} has no effect: PyTorch's optimizers do not need it.\n"
            "  fix: pass the parameters to the optimizer",
            stacklevel=2,
        )
        self._parameters = list(parameters)

    def contiguous(self) -> list[nn.Parameter | dict[str, Any]]:
        """Return the parameters for the optimizer."""
        return self._parameters

    def original(self) -> list[nn.Parameter | dict[str, Any]]:
        """Return the parameters."""
        return self._parameters

    def buffer_is_valid(self) -> bool:
        """Return True: there is no buffer."""
        return True

    def assert_buffer_is_valid(self) -> None:
        """Do nothing: there is no buffer."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parameters)
