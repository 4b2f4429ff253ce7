"""Facts about the training set in the modules of a model."""

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fastamp.config import read_config
from fastamp.data.custom_loader import as_train_loader
from fastamp.modeling.training_state import set_class_counts


class Labeled(Dataset):
    """Four images of two classes."""

    labels, num_classes = [0, 1, 1, 1], 2

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"targets": self.labels[index]}


class Unlabeled(Dataset):
    """Images of unknown classes."""

    def __len__(self):
        return 4


class Delegating(Dataset):
    """Dataset around another one, whose members it looks up dynamically."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)


class Margin(nn.Module):
    """Module that uses the class counts."""

    counts = None

    def set_class_counts(self, counts):
        self.counts = counts


def counts_of(dataset):
    model = Margin()
    set_class_counts(model, as_train_loader(DataLoader(dataset, batch_size=2), read_config("", [])))
    return None if model.counts is None else np.asarray(model.counts).tolist()


def test_class_counts_reach_the_modules_from_a_dataset_and_from_one_around_it():
    assert counts_of(Labeled()) == counts_of(Delegating(Labeled())) == [1, 3]


def test_unknown_labels_set_no_class_counts():
    assert counts_of(Unlabeled()) is None


def test_a_loader_over_a_list_has_no_labels():
    assert counts_of([{"targets": 0}, {"targets": 1}]) is None
