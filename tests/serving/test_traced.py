"""Tests of the traced network: features of the Predictor, and when it computes without the trace."""

import pytest
import torch

from fastamp import Predictor
from fastamp.serving.traced import traced_features
from fastamp.utils.errors import DataError


@pytest.fixture
def predictor(checkpoint, demo):
    return Predictor(checkpoint, device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", "float32"])


@pytest.fixture
def eager(predictor, monkeypatch):
    """Numbers of images that were computed without the trace."""
    found, original = [], predictor.features_of_preprocessed
    monkeypatch.setattr(
        predictor, "features_of_preprocessed", lambda images: found.append(len(images)) or original(images)
    )
    return found


def pixels(predictor, count, height=256):
    images = torch.randint(256, (count, predictor.transforms.channels, height, 128), dtype=torch.uint8)
    return [predictor.preprocess(image) for image in images]


@pytest.mark.parametrize("flip", ["False", "True"])
@pytest.mark.parametrize("dtype", ["float32", "same"])  # same: bfloat16
def test_features_equal_those_of_the_predictor(checkpoint, demo, dtype, flip):
    options = ["SOLVER.AMP.EVAL_DTYPE", dtype, "TEST.FLIP.ENABLED", flip]
    predictor = Predictor(checkpoint, device="cpu", opts=options)
    compute = traced_features(predictor, pixels(predictor, 1)[0])
    assert compute != predictor.features_of_preprocessed
    for count in (1, 2, 5):
        images = pixels(predictor, count)
        assert torch.allclose(compute(images), predictor.features_of_preprocessed(images), rtol=1e-4, atol=1e-5)


def test_the_trace_computes_images_of_the_size_of_the_example_only(predictor, eager):
    (example,) = pixels(predictor, 1)
    compute = traced_features(predictor, example)
    eager.clear()
    assert compute([example, example]).shape == (2, predictor.feature_dim)
    assert not eager
    larger = torch.zeros(predictor.transforms.channels, example.shape[1] + 32, example.shape[2], dtype=torch.uint8)
    assert compute([larger]).shape == (1, predictor.feature_dim) and eager == [1]


def test_features_that_are_not_finite_are_the_error_of_the_predictor(predictor, monkeypatch):
    (example,) = pixels(predictor, 1)
    compute = traced_features(predictor, example)
    with torch.no_grad():
        next(predictor.model.parameters()).fill_(torch.nan)
    monkeypatch.setattr("fastamp.serving.traced._compute", lambda *_: torch.full((1, 4), torch.nan))
    with pytest.raises(DataError, match="SOLVER.AMP.EVAL_DTYPE"):
        compute([example])


def test_a_network_that_cannot_be_traced_is_computed_without_a_trace(predictor, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("unsupported operator\n  further lines")

    monkeypatch.setattr(torch.jit, "trace", fail)
    assert traced_features(predictor, pixels(predictor, 1)[0]) == predictor.features_of_preprocessed
    assert caplog.messages[-1] == "computing without a trace: RuntimeError: unsupported operator"


def test_a_trace_with_the_batch_size_of_the_example_is_not_used(predictor, monkeypatch, caplog):
    forward = predictor.model.forward
    predictor.model.forward = lambda batch: forward(batch) * len(batch["images"].tolist())  # a constant of the trace
    assert traced_features(predictor, pixels(predictor, 1)[0]) == predictor.features_of_preprocessed
    assert caplog.messages[-1].startswith("computing without a trace: AssertionError")
