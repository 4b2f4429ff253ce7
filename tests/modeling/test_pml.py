"""Losses of pytorch-metric-learning: values, arguments, learnable parameters and errors."""

import sys

import pml_components
import pytest
import tiny
import torch

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import get_cfg
from fastamp.modeling import build_model
from fastamp.modeling.losses import build_losses
from fastamp.solver import build_optimizer
from fastamp.utils.errors import ConfigError

losses = pytest.importorskip("pytorch_metric_learning.losses")
miners = pytest.importorskip("pytorch_metric_learning.miners")

TARGETS = torch.arange(12) // 3


def config(names, *opts):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.HEADS.NUM_CLASSES", "4", "MODEL.BACKBONE.FEAT_DIM", "8", "MODEL.LOSSES.NAME", names])
    cfg.merge_from_list([*opts])
    return cfg


def test_pml_losses_with_configured_arguments_equal_pytorch_metric_learning():
    names = ["pml/TripletMarginLoss", "pml/MultiSimilarityLoss", "TripletLoss"]
    args = "{TripletMarginLoss: {margin: 0.3, swap: True}, MultiSimilarityLoss: {beta: 40}}"
    built = build_losses(config(names, "MODEL.LOSSES.PML.ARGS", args, "MODEL.LOSSES.PML.SCALE", "2"))
    assert list(built) == ["loss_triplet_margin", "loss_multi_similarity", "loss_triplet"]
    features = torch.randn(12, 8)
    for name, expected in (
        ("loss_triplet_margin", losses.TripletMarginLoss(margin=0.3, swap=True)),
        ("loss_multi_similarity", losses.MultiSimilarityLoss(beta=40)),
    ):
        torch.testing.assert_close(built[name]({"features": features}, TARGETS), 2 * expected(features, TARGETS))
    other = losses.TripletMarginLoss()(features, TARGETS)
    assert not torch.allclose(built["loss_triplet_margin"]({"features": features}, TARGETS), 2 * other)


def test_pml_loss_uses_pairs_selected_by_configured_miner():
    cfg = config(["pml/TripletMarginLoss"], "MODEL.LOSSES.PML.MINER", "TripletMarginMiner")
    cfg.MODEL.LOSSES.PML.ARGS = {"TripletMarginMiner": {"margin": 0.1, "type_of_triplets": "hard"}}
    features = torch.randn(12, 8)
    pairs = miners.TripletMarginMiner(margin=0.1, type_of_triplets="hard")(features, TARGETS)
    expected = losses.TripletMarginLoss()(features, TARGETS, pairs)
    loss = build_losses(cfg)["loss_triplet_margin"]({"features": features}, TARGETS)
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, losses.TripletMarginLoss()(features, TARGETS))


WITH_WEIGHTS = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "SubCenterArcFaceLoss",
    "ProxyAnchorLoss",
    "SoftTripleLoss",
    "P2SGradLoss",
]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_optimizer_updates_learnable_parameters_of_pml_losses(name, tmp_path):
    opts = ("MODEL.LOSSES.NAME", f"('CrossEntropyLoss', 'pml/{name}')", "MODEL.HEADS.NUM_CLASSES", "3")
    cfg = tiny.tiny_config(tmp_path, *opts, "MODEL.HEADS.EMBEDDING_DIM", "4", "MODEL.HEADS.NECK_FEAT", "after")
    model = build_model(cfg)
    batch = {"images": torch.randint(256, (6, 3, 64, 32), dtype=torch.uint8), "targets": torch.arange(6) // 2}
    parameters = {key: p for key, p in model.named_parameters() if key.startswith("losses.")}
    before = {key: p.detach().clone() for key, p in parameters.items()}
    optimizer = build_optimizer(cfg, model)
    assert len(parameters) == 1
    sum(model(batch).values()).backward()
    optimizer.step()
    assert all(not torch.equal(p, before[key]) for key, p in parameters.items())


def test_pml_loss_discards_proxies_of_other_identities(tmp_path):
    opts = ("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'pml/ProxyAnchorLoss')")
    models = [build_model(tiny.tiny_config(tmp_path, *opts, "MODEL.HEADS.NUM_CLASSES", n)) for n in ("3", "5", "0")]
    report = load_model_state(models[1], models[0].state_dict(), source="test")
    assert sorted(report.other_shape) == ["heads.weight", "losses.loss_proxy_anchor.loss.proxies"]
    report = load_model_state(models[2], models[0].state_dict(), source="test")
    assert report.dropped == ["losses.loss_proxy_anchor.loss.proxies"] and not report.missing


def test_all_pml_losses_support_two_training_steps(subtests):
    for name in pml_components.LOSSES:
        with subtests.test(name=name):
            loss = build_losses(config(["TripletLoss"], *pml_components.pml_options(name)))
            for _ in range(2):
                features = torch.randn(12, 8, requires_grad=True)
                (value,) = (function({"features": features}, TARGETS) for function in loss.values())
                value.backward()
                assert value.shape == () and torch.isfinite(features.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pml_loss_is_float32_under_autocast(dtype):
    loss = build_losses(config(["pml/NTXentLoss"]))["loss_nt_xent"]
    features = torch.randn(12, 8).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        low = loss({"features": features}, TARGETS)
    assert low.dtype == torch.float32 and torch.equal(low, loss({"features": features.float()}, TARGETS))


@pytest.mark.parametrize("targets", [[0, 0, 0], [0, 1, 2], [0]])
def test_pml_loss_has_zero_gradient_if_batch_has_no_pairs(targets):
    features = torch.randn(len(targets), 8, requires_grad=True)
    loss = build_losses(config(["pml/TripletMarginLoss"]))["loss_triplet_margin"]
    loss({"features": features}, torch.tensor(targets)).backward()
    assert torch.equal(features.grad, torch.zeros_like(features))


@pytest.mark.parametrize(
    "names, opts, parts",
    [
        (["pml/TripletMarginLos"], (), ["MODEL.LOSSES.NAME: 'pml/TripletMarginLos'", "'pml/TripletMarginLoss'?"]),
        (["pml/VICRegLoss"], (), ["pml/VICRegLoss", "pml/AngularLoss"]),
        (["pml/DynamicSoftMarginLoss"], (), ["'pml/DynamicSoftMarginLoss'"]),
        (
            ["pml/TripletMarginLoss"],
            ("MODEL.LOSSES.PML.ARGS", "{TripletMarginLoss: 0.1}"),
            ["TripletMarginLoss is 0.1"],
        ),
        (
            ["pml/ContrastiveLoss"],
            ("MODEL.LOSSES.PML.MINER", "BatchHardMine"),
            ["MODEL.LOSSES.PML.MINER: 'BatchHardMine'", "'BatchHardMiner'?", "choices: AngularMiner"],
        ),
        (
            ["pml/TripletMarginLoss"],
            ("MODEL.LOSSES.PML.ARGS", "{TripletMarginLoss: {margn: 0.1}}"),
            ["TripletMarginLoss", "'margn'", "'margin'?", "choices: margin, swap, smooth_loss"],
        ),
        (
            ["pml/ArcFaceLoss"],
            ("MODEL.LOSSES.PML.ARGS.ArcFaceLoss.num_classes", "9"),
            ["ArcFaceLoss", "'num_classes'", "choices: margin, scale"],
        ),
        (
            ["pml/TripletMarginLoss"],
            ("MODEL.LOSSES.PML.ARGS", "{TripletMarginLos: {margin: 0.1}}"),
            ["'TripletMarginLos.margin'", "MODEL.LOSSES.NAME", "'TripletMarginLoss'?"],
        ),
        (["pml/RankedListLoss"], (), ["MODEL.LOSSES.PML.ARGS: RankedListLoss", "choices: margin, Tn"]),
        (["pml/CircleLoss", "CircleLoss"], (), ["loss_circle"]),
    ],
)
def test_unknown_or_invalid_pml_loss_miner_or_argument_raises(names, opts, parts):
    with pytest.raises(ConfigError) as caught:
        build_losses(config(names, *opts))
    for part in parts:
        assert part in str(caught.value)


def test_pml_loss_raises_if_pytorch_metric_learning_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(ConfigError, match=r'pml/NCALoss(.|\n)*pip install "fastamp\[metric-learning\]"'):
        build_losses(config(["pml/NCALoss"]))
