"""Embedding head with FastReID's constructor."""

from typing import Any

from torch import nn

from fastamp.config import CfgNode
from fastamp.fastreid.config import configurable
from fastamp.fastreid.layers import any_softmax, weights_init_kaiming
from fastamp.modeling.heads import embedding_head

_ARGUMENTS = {"pool_type": "pool_layer", "cls_type": "cls_layer", "norm_type": "norm"}


class EmbeddingHead(embedding_head.EmbeddingHead):
    """Head whose constructor takes a config, or FastReID's arguments; see ``fastamp.modeling.heads.EmbeddingHead``.

    The attribute ``cls_layer`` can be called as in FastReID, ``cls_layer(logits, targets)``.

    Args:
        pool_type, cls_type, norm_type: the arguments ``pool_layer``, ``cls_layer`` and ``norm``.
        arguments: other arguments of ``fastamp.modeling.heads.EmbeddingHead``.
    """

    takes_config = True

    @configurable
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**{_ARGUMENTS.get(name, name): value for name, value in arguments.items()})
        layer = getattr(any_softmax, type(self.cls_layer).__name__, None)
        if layer is not None:
            self.cls_layer = layer(len(self.weight), self.cls_layer.scale, self.cls_layer.margin)
        if type(self).reset_parameters is not EmbeddingHead.reset_parameters:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the neck and the class weights; called by the constructor if a subclass overrides it."""
        self.bottleneck.apply(weights_init_kaiming)
        nn.init.normal_(self.weight, std=0.01)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Return the constructor arguments configured in ``MODEL.HEADS``, under FastReID's names."""
        names = {name: old for old, name in _ARGUMENTS.items()}
        return {names.get(name, name): value for name, value in super().from_config(cfg).items()}
