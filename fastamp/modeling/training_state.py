"""Facts about the training that modules of a model need: the labels of the training set and the epoch."""

from typing import Any

import numpy as np
from torch import nn


def set_class_counts(model: nn.Module, data_loader: Any) -> None:
    """Set the number of training images of each class, and the columns of the training set, in the modules of a model.

    Args:
        model: model whose modules may have a method ``set_class_counts(counts)``, for the margins of classification
            layers, or ``set_training_columns(labels, columns)``.
        data_loader: training loader; nothing is set if its dataset has no ``labels`` in 0..num_classes-1.
    """
    labels = getattr(data_loader.dataset, "labels", None)
    if labels is None:
        return
    labels = np.asarray(labels, dtype=np.int64)
    columns = {name: column.values for name, column in getattr(data_loader.dataset, "columns", {}).items()}
    for module in model.modules():
        if hasattr(module, "set_class_counts"):
            module.set_class_counts(np.bincount(labels, minlength=data_loader.dataset.num_classes))
        if hasattr(module, "set_training_columns"):
            module.set_training_columns(labels, columns)


def set_epoch(model: nn.Module, epoch: int) -> None:
    """Set the current epoch in the modules of a model.

    Args:
        model: model whose modules may have a method ``set_epoch(epoch)``, for losses that start later.
        epoch: current epoch, from 0.
    """
    for module in model.modules():
        if hasattr(module, "set_epoch"):
            module.set_epoch(epoch)
