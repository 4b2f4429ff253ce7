"""Facts about the training that modules of a model need: the labels of the training set and the epoch."""

import numpy as np
from torch import nn

from fastamp.contracts import ClassCountUser, EpochUser, Loader, TrainingColumnUser


def set_class_counts(model: nn.Module, data_loader: Loader) -> None:
    """Set the number of training images of each class, and the columns of the training set, in the modules of a model.

    Args:
        model: model whose modules may be a ``ClassCountUser`` or a ``TrainingColumnUser``.
        data_loader: training loader; nothing is set if the labels of its dataset are unknown.
    """
    dataset = data_loader.dataset
    if dataset.labels is None:
        return
    labels = np.asarray(dataset.labels, dtype=np.int64)
    columns = {name: column.values for name, column in dataset.columns.items()}
    for module in model.modules():
        if isinstance(module, ClassCountUser):
            module.set_class_counts(np.bincount(labels, minlength=dataset.num_classes))
        if isinstance(module, TrainingColumnUser):
            module.set_training_columns(labels, columns)


def set_epoch(model: nn.Module, epoch: int) -> None:
    """Set the current epoch in the modules of a model.

    Args:
        model: model whose modules may be an ``EpochUser``.
        epoch: current epoch, from 0.
    """
    for module in model.modules():
        if isinstance(module, EpochUser):
            module.set_epoch(epoch)
