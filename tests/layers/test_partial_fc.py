"""Partial FC in one process: reference values, sampling, and updates of the sampled rows only."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp.row_update import ROW_OPTIMIZERS, step_rows
from fastamp.layers import CLS_LAYER_REGISTRY, PartialFC
from fastamp.layers.partial_fc import PartialLogits
from fastamp.utils.errors import ConfigError

REFERENCE = np.load(Path(__file__).parents[1] / "reference" / "methods" / "pfc1.npz")
WEIGHT, EMBEDDINGS, LABELS = (torch.from_numpy(REFERENCE[name]) for name in ("weight", "embeddings", "labels"))
LAYERS = {"CosSoftmax": (64, 0.4), "ArcSoftmax": (64, 0.5), "CircleSoftmax": (256, 0.25), "Linear": (1, 0.0)}


def run(partial_fc: PartialFC, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor, nn.Parameter]:
    """Return the loss, the gradient of the embeddings, and the weight with its gradient."""
    features, weight = EMBEDDINGS.clone().requires_grad_(), nn.Parameter(WEIGHT.clone())
    loss = partial_fc.logits(features, weight, LABELS, layer).cross_entropy()
    loss.backward()
    return loss.detach(), features.grad, weight


def with_sample(rate: float, classes: np.ndarray | None) -> PartialFC:
    """Build the module; with ``classes``, it draws these."""
    partial_fc = PartialFC(num_classes=len(WEIGHT), sample_rate=rate)
    if classes is not None:
        partial_fc.sample = lambda positive: torch.from_numpy(classes)
    return partial_fc


def assert_near(actual: torch.Tensor, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    expected = torch.as_tensor(np.asarray(expected), dtype=actual.dtype)
    assert (actual - expected).abs().max() <= tolerance * max(expected.abs().max(), 1)


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("name", LAYERS)
def test_loss_gradients_and_sgd_step_equal_fastreid(name, rate):
    scale, margin = LAYERS[name]
    stem = f"fr_{name}_rate{rate}_"
    classes = REFERENCE[f"{stem}sampled_classes"] if rate < 1 else None
    layer = CLS_LAYER_REGISTRY.get(name)(scale=scale, margin=margin)
    loss, gradient, weight = run(with_sample(rate, classes), layer)
    used = weight.grad if rate == 1 else weight.grad.coalesce().values()
    assert_near(loss, REFERENCE[f"{stem}loss"])
    assert_near(gradient, REFERENCE[f"{stem}grad_embeddings"], 2e-6)
    assert_near(used, REFERENCE[f"{stem}grad_weight"], 2e-6)
    step_rows(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    assert_near(weight.detach(), REFERENCE[f"{stem}weight_after_sgd_lr0.1_m0.9"], 2e-6)


@pytest.mark.parametrize(
    ("name", "stem", "rate"),
    [
        ("CosSoftmax", "cos_0.4", 1),
        ("CosSoftmax", "cos_0.4_rate0.1", 0.1),
        ("DetachedArcSoftmax", "arc_0.5", 1),
        ("DetachedArcSoftmax", "arc_0.5_rate0.3", 0.3),
    ],
)
def test_loss_and_gradients_equal_insightface(name, stem, rate):
    classes = REFERENCE[f"{stem}_sampled_classes"] if rate < 1 else None
    margin = 0.4 if name == "CosSoftmax" else 0.5
    loss, gradient, weight = run(with_sample(rate, classes), CLS_LAYER_REGISTRY.get(name)(scale=64, margin=margin))
    assert_near(loss, REFERENCE[f"{stem}_loss"])
    assert_near(gradient, REFERENCE[f"{stem}_grad_embeddings"], 2e-6)
    assert_near(weight.grad.to_dense(), REFERENCE[f"{stem}_grad_weight"], 2e-6)


def test_wrong_classes_above_the_filter_count_as_orthogonal_as_in_insightface():
    layer = CLS_LAYER_REGISTRY.get("CosSoftmax")(scale=64, margin=0.4, filter_above=0.3)
    loss, gradient, weight = run(with_sample(1, None), layer)
    assert_near(loss, REFERENCE["cos_0.4_filter0.3_loss"])
    assert_near(gradient, REFERENCE["cos_0.4_filter0.3_grad_embeddings"], 2e-6)
    assert_near(weight.grad, REFERENCE["cos_0.4_filter0.3_grad_weight"], 2e-6)
    unfiltered = CLS_LAYER_REGISTRY.get("CosSoftmax")(scale=64, margin=0.4)
    assert not torch.isclose(run(with_sample(1, None), unfiltered)[0], loss)


def test_arcface_has_the_exact_gradient_unless_detached():
    _, exact, weight = run(with_sample(1, None), CLS_LAYER_REGISTRY.get("ArcSoftmax")(scale=64, margin=0.5))
    assert_near(exact, REFERENCE["exact_arc_0.5_grad_embeddings"], 2e-6)
    assert_near(weight.grad, REFERENCE["exact_arc_0.5_grad_weight"], 2e-6)
    _, detached, _ = run(with_sample(1, None), CLS_LAYER_REGISTRY.get("DetachedArcSoftmax")(scale=64, margin=0.5))
    assert (exact - detached).abs().max() > 0.1 * exact.abs().max()


@pytest.mark.parametrize(("name", "stem"), [("ArcSoftmax", "ArcFace_64_0.5"), ("CosSoftmax", "CosFace_64_0.4")])
def test_rows_with_target_minus_1_have_no_margin(name, stem):
    cosines = torch.from_numpy(REFERENCE["cos_matrix"])
    layer = CLS_LAYER_REGISTRY.get(name)(scale=64, margin=float(stem.rpartition("_")[2]))
    layer._cosines = lambda features, weight: features
    logits, plain = layer(cosines, cosines, torch.from_numpy(REFERENCE["cos_labels"]))
    assert_near(logits, REFERENCE[f"logits_{stem}"], 1e-5)
    assert torch.equal(logits[-1], plain[-1])


def test_rate_1_equals_the_full_softmax(subtests):
    for name, dtype in itertools.product(sorted(CLS_LAYER_REGISTRY), [torch.float32, torch.float64]):
        with subtests.test(name=name, dtype=dtype):
            centers = 2 if name == "SubCenterArcSoftmax" else 1
            options = {"num_classes": 30} if name == "SubCenterArcSoftmax" else {}
            layer = CLS_LAYER_REGISTRY.get(name)(scale=8, margin=0.3, **options)
            layer.set_class_counts(np.arange(1, 31))
            labels = torch.tensor([3, 7, 7, 29, 0, 12])
            results = []
            for partial in (True, False):
                features = EMBEDDINGS[:6].to(dtype).requires_grad_()
                weight = nn.Parameter(WEIGHT[: 30 * centers].to(dtype))
                if partial:
                    loss = (
                        PartialFC(num_classes=30, centers=centers)
                        .logits(features, weight, labels, layer)
                        .cross_entropy()
                    )
                else:
                    loss = F.cross_entropy(layer(features, weight, labels)[0], labels)
                loss.backward()
                results.append([loss.detach(), features.grad, weight.grad])
            for partial, full in zip(*results, strict=True):
                assert torch.allclose(partial, full, rtol=1e-5, atol=1e-6)


def test_sampled_softmax_equals_the_naive_loop_over_the_sampled_classes():
    layer = CLS_LAYER_REGISTRY.get("SubCenterArcSoftmax")(scale=8, margin=0.3, num_classes=30)
    layer.set_class_counts(np.arange(1, 31))
    partial_fc = PartialFC(num_classes=30, sample_rate=0.5, centers=2, seed=3)
    labels = LABELS % 30
    given = labels.clone()
    classes = PartialFC(num_classes=30, sample_rate=0.5, centers=2, seed=3).sample(labels.unique())
    loss = partial_fc.logits(EMBEDDINGS, nn.Parameter(WEIGHT.clone()), labels, layer).cross_entropy()
    terms = []
    for feature, label in zip(EMBEDDINGS, labels, strict=True):
        logits, _ = layer(feature[None], WEIGHT, label[None])
        chosen = logits[0][classes]
        terms.append(-(logits[0, label] - torch.logsumexp(chosen, 0)))
    assert torch.allclose(loss, torch.stack(terms).mean(), rtol=1e-5)
    assert torch.equal(labels, given)  # FastReID overwrites them


def test_sample_has_all_positives_and_the_right_size():
    partial_fc = PartialFC(num_classes=100, sample_rate=0.25)
    positive = torch.tensor([5, 99, 0])
    counts = torch.zeros(100)
    for _ in range(200):
        classes = partial_fc.sample(positive)
        assert len(classes) == 25 and torch.equal(classes, classes.unique())
        assert set(positive.tolist()) <= set(classes.tolist())
        counts[classes] += 1
    others = counts[torch.tensor([i for i in range(100) if i not in (5, 99, 0)])]
    assert others.min() > 20 and others.max() < 75  # expected 200 * 22 / 97 = 45
    assert torch.equal(partial_fc.sample(torch.arange(40).flip(0)), torch.arange(40))  # more positives than 25
    assert len(PartialFC(num_classes=5, sample_rate=0.01).sample(torch.tensor([], dtype=torch.int64))) == 1


@pytest.mark.parametrize(("rate", "positive"), [(0.5, 10), (0.51, 50), (0.95, 3), (0.99, 97), (0.99, 0), (0.02, 1)])
def test_large_and_small_samples_are_uniform(rate, positive):
    partial_fc, counts = PartialFC(num_classes=100, sample_rate=rate), torch.zeros(100)
    for _ in range(300):
        classes = partial_fc.sample(torch.arange(positive))
        assert len(classes) == int(100 * rate) and torch.equal(classes, classes.unique())
        counts[classes] += 1
    expected = 300 * (int(100 * rate) - positive) / (100 - positive)
    assert (counts[:positive] == 300).all()
    assert (counts[positive:] - expected).abs().max() < 5 * (expected * (1 - expected / 300)) ** 0.5


def test_samples_depend_on_seed_and_number_of_draws_only():
    first, second = (PartialFC(num_classes=1000, sample_rate=0.1, seed=4) for _ in range(2))
    positive = torch.tensor([1])
    state = torch.get_rng_state()
    samples = [first.sample(positive) for _ in range(3)]
    assert torch.equal(state, torch.get_rng_state())
    second.draws = 2  # as after a resume
    assert torch.equal(second.sample(positive), samples[2])
    assert not torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], PartialFC(num_classes=1000, sample_rate=0.1, seed=5).sample(positive))


def test_unsampled_rows_keep_values_and_state(subtests):
    """The update of the sampled rows equals that of a parameter that consists of these rows."""
    for name in ROW_OPTIMIZERS:
        with subtests.test(name=name):
            torch.manual_seed(0)
            options = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
            whole = nn.Parameter(torch.randn(8, 3))
            start = whole.detach().clone()
            optimizer = getattr(torch.optim, name)([whole], **options)
            part = nn.Parameter(whole.detach()[[1, 4]])
            reference = getattr(torch.optim, name)([part], **options)
            for _ in range(3):
                part.grad = torch.randn(2, 3)
                rows = torch.tensor([[1, 4]])
                whole.grad = torch.sparse_coo_tensor(rows, part.grad.clone(), (8, 3), check_invariants=True)
                step_rows(optimizer)
                reference.step()
            assert torch.equal(whole[[1, 4]], part)
            others = [0, 2, 3, 5, 6, 7]
            assert torch.equal(whole[others], start[others])
            for key, value in optimizer.state[whole].items():
                expected = reference.state[part][key]
                assert torch.equal(value[[1, 4]] if value.shape == whole.shape else value, expected)
            assert optimizer.param_groups[0]["params"][0] is whole and len(optimizer.state) == 1


def test_momentum_moves_unsampled_rows_with_a_dense_gradient():
    """Negative control: insightface's V2 behaves like this."""
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)
    weight.grad = torch.zeros(4, 2)
    weight.grad[0] = 1
    step_rows(optimizer)
    assert (weight[1:] != 1).all()


def test_gradients_of_micro_batches_add_up():
    partial_fc = PartialFC(num_classes=60, sample_rate=0.3)
    layer = CLS_LAYER_REGISTRY.get("CosSoftmax")(scale=64, margin=0.4)
    weight, expected = nn.Parameter(WEIGHT.clone()), torch.zeros_like(WEIGHT)
    for rows in (slice(0, 6), slice(6, 12)):
        partial_fc.logits(EMBEDDINGS[rows], weight, LABELS[rows], layer).cross_entropy().backward()
        single = nn.Parameter(WEIGHT.clone())
        twin = PartialFC(num_classes=60, sample_rate=0.3)
        twin.draws = partial_fc.draws - 1
        twin.logits(EMBEDDINGS[rows], single, LABELS[rows], layer).cross_entropy().backward()
        expected += single.grad.to_dense()
    assert torch.allclose(weight.grad.to_dense(), expected)


def test_probability_of_zero_has_a_finite_loss_and_the_gradient_of_the_softmax():
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = PartialLogits(logits, torch.tensor([1])).cross_entropy()
    loss.backward()
    assert loss.item() == pytest.approx(-np.log(1e-30), rel=1e-6)
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0]]))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5])
def test_sample_rate_out_of_range(rate):
    with pytest.raises(ConfigError, match="SAMPLE_RATE"):
        PartialFC(num_classes=4, sample_rate=rate)
