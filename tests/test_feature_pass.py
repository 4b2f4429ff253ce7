"""Tests of the pass that computes features: outputs, order, modes, random numbers and values that are not finite."""

from operator import itemgetter

import pytest
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.feature_pass import NotFiniteError, Rows, collect_features, evaluation_mode, feature_pass
from fastamp.utils import comm
from fastamp.utils.errors import DataError, TrainingError

POLICY = PrecisionPolicy("cpu", torch.float32)


class Mean(nn.Module):
    """Mean of each channel and of its left half, so that mirrored images differ."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout()

    def forward(self, batch):
        images = batch["images"].double()
        return self.dropout(torch.cat((images.mean((2, 3)), images[..., :1].mean((2, 3))), dim=1))


def loader(order=range(6), size=2):
    images = torch.randint(256, (len(order), 3, 4, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor(list(order))
    return [
        {"images": images[rows], "indices": rows, "targets": rows % 2}
        for rows in indices.split(size)
    ]  # fmt: skip


def test_features_are_in_the_order_of_the_loader_or_of_the_indices():
    model, order = Mean().eval(), [4, 1, 5, 0, 2, 3]
    expected = collect_features(model, loader(), POLICY)["features"]
    assert expected.shape == (6, 6)
    columns = {"targets": itemgetter("targets")}
    found = collect_features(model, loader(order), POLICY, columns=columns)
    assert torch.equal(found["features"], expected[order]) and found["targets"].tolist() == [0, 1, 1, 0, 0, 1]
    found = collect_features(model, loader(order), POLICY, columns=columns | {"indices": itemgetter("indices")})
    assert torch.equal(found["features"], expected) and found["targets"].tolist() == [0, 1] * 3


def test_flip_test_averages_all_outputs_of_a_function():
    def both(model, batch):
        return {"means": model(batch), "corner": batch["images"][:, 0, :, 0].double()}

    model = Mean().eval()
    plain, flipped = (collect_features(model, loader(), POLICY, forward=both, flip_test=flip) for flip in (False, True))
    mirrored = [batch | {"images": batch["images"].flip(3)} for batch in loader()]
    mirror = collect_features(model, mirrored, POLICY, forward=both)
    assert flipped.keys() == {"means", "corner"}
    for name, values in flipped.items():
        torch.testing.assert_close(values, (plain[name] + mirror[name]) / 2)
        assert not torch.equal(plain[name], mirror[name])


def test_pass_restores_the_mode_of_each_module_and_the_random_numbers():
    class Drawing(list):
        def __iter__(self):
            torch.rand(3)
            return super().__iter__()

    model = Mean().train()
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = collect_features(model, Drawing(loader()), POLICY)["features"]
    assert torch.equal(torch.rand(2), expected) and model.training and model.dropout.training
    assert torch.equal(first, collect_features(model.eval(), loader(), POLICY)["features"]) and not model.training
    model.dropout.train()
    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        assert not model.dropout.training
        raise ZeroDivisionError
    assert model.dropout.training and not model.training


@pytest.mark.parametrize("on_all_ranks", [True, False])
def test_values_that_are_not_finite_raise_an_error_that_names_the_batch(on_all_ranks):
    batches, received = loader(), []
    batches[1]["images"] = batches[1]["images"] * torch.nan
    batches[1]["img_paths"] = ["wrong.jpg", "right.jpg"]
    with pytest.raises(NotFiniteError, match=r"batch 1, first image wrong\.jpg(.|\n)*hint") as error:
        feature_pass(
            Mean().eval(),
            batches,
            lambda batch, outputs: received.append(outputs),
            POLICY,
            on_all_ranks=on_all_ranks,
            locate=lambda *_: "hint",
        )
    assert isinstance(error.value, DataError) and isinstance(error.value, TrainingError)
    assert len(received) == (3 if on_all_ranks else 1)


def test_values_that_are_not_finite_in_an_iterator_name_the_batch_number():
    batches = loader()
    batches[1]["images"] = batches[1]["images"] * torch.nan
    with pytest.raises(NotFiniteError, match="batch 1"):
        collect_features(Mean().eval(), iter(batches), POLICY, locate=lambda *_: "hint")


def test_collected_features_can_be_used_in_a_loss():
    """The pass runs in inference mode, whose tensors cannot be saved for a backward pass."""
    features = collect_features(Mean().eval(), loader(), POLICY)["features"]
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    (features * weight).sum().backward()
    assert torch.equal(weight.grad, features.sum(0))


def test_a_loader_without_batches_gives_no_columns():
    assert Rows().gather() == collect_features(Mean(), [], POLICY) == {}


@pytest.mark.parametrize("count", [0, 2])
def test_all_ranks_raise_an_error_if_one_has_no_images(monkeypatch, count):
    """Otherwise, the others would wait for it."""
    monkeypatch.setattr(comm, "is_distributed", lambda: True)
    monkeypatch.setattr(comm, "get_world_size", lambda: 3)
    monkeypatch.setattr(comm, "max_over_ranks", lambda number: 1.0)  # the other rank has none
    rows = Rows()
    if count:
        rows.append({"features": torch.zeros(count, 3)})
    with pytest.raises(DataError):
        rows.gather()
