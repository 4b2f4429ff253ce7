"""LightMBN: branches, dropped rows, losses, and files of the authors' program."""

import math

import pytest
import torch

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import get_cfg, read_config
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.modeling.losses import cross_entropy_loss
from fastamp.modeling.meta_arch.lightmbn import HEADS, drop_top_rows
from fastamp.utils.errors import ConfigError

D = 8
TARGETS = torch.tensor([0, 0, 0, 1, 1, 2])
PUBLISHED = {"average": 0, "drop": 4, "whole": 1, "upper": 2, "lower": 3}


def config(*opts):
    return read_config("", [
        "MODEL.META_ARCHITECTURE", "LightMBN", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", "build_osnet_backbone",
        "MODEL.BACKBONE.DEPTH", "x0_25", "MODEL.BACKBONE.FEAT_DIM", "128", "MODEL.HEADS.EMBEDDING_DIM", str(D),
        "MODEL.HEADS.NUM_CLASSES", "3", "MODEL.HEADS.WITH_BNNECK", "True", *opts,
    ])  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build_model(config())
    for name, value in model.state_dict().items():  # neither the initial statistics nor equal branches
        if name.endswith("running_var"):
            value.uniform_(0.5, 2)
        elif value.is_floating_point() and value.dim() > 0:
            value.add_(0.02 * torch.randn_like(value))
    return model.eval()


def branch_map(model, images, branch):
    """Compute the map of a branch with a complete OSNet that has the weights of the shared layers and of the branch."""
    osnet = build_backbone(model_config := config()).eval()
    names = {"backbone.0": "conv1", "backbone.2": "conv2", "backbone.3": "conv3.0"}
    names |= {f"{branch}.0": "conv3", f"{branch}.1": "conv4", f"{branch}.2": "conv5"}
    state = {
        new + name.removeprefix(old): value
        for name, value in model.state_dict().items()
        for old, new in names.items()
        if name.startswith(f"{old}.")
    }
    osnet.load_state_dict(state)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (model_config.MODEL.PIXEL_MEAN, model_config.MODEL.PIXEL_STD))
    return osnet((images - mean) / std)


def reduce(model, name, pooled):
    """Apply the 1x1 convolution of a feature, or the shared layer, to a vector (C,)."""
    if name in PUBLISHED:
        return model.reductions[name].weight[:, :, 0, 0] @ pooled
    convolution, norm, _ = model.shared
    value = convolution.weight[:, :, 0, 0] @ pooled
    value = (value - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return value.clamp(min=0)


def naive_features(model, images):
    """Compute the features before the neck one image at a time: head name -> (B, D)."""
    whole = model.drop_block(branch_map(model, images, "global_branch"))
    parts, channels = (branch_map(model, images, f"{name}_branch") for name in ("partial", "channel"))
    half = parts.shape[2] // 2
    rows = []
    for g, p, c in zip(whole, parts, channels, strict=True):
        averages = torch.stack([channel.mean() for channel in c])
        pooled = {
            "average": torch.stack([channel.mean() for channel in g]),
            "drop": torch.stack([channel.max() for channel in g]),
            "whole": torch.stack([channel.max() for channel in p]),
            "upper": torch.stack([channel[:half].mean() for channel in p]),
            "lower": torch.stack([channel[half:].mean() for channel in p]),
            "first": averages[: len(averages) // 2],
            "second": averages[len(averages) // 2 :],
        }
        rows.append({name: reduce(model, name, value) for name, value in pooled.items()})
    return {name: torch.stack([row[name] for row in rows]) for name in HEADS}


@torch.no_grad()
def test_features_equal_a_naive_composition_of_complete_osnets(model):
    images = torch.randint(256, (2, 3, 96, 48), dtype=torch.uint8)
    expected = []
    for name, value in naive_features(model, images).items():
        norm = model.get_submodule(f"{name}_head").bottleneck[0]
        neck = (value - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
        expected.append(neck / neck.norm(dim=1, keepdim=True))
    torch.testing.assert_close(model(images), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("height, dropped", [(1, 0), (2, 1), (6, 2), (24, 8)])
def test_most_active_rows_are_dropped(height, dropped):
    maps = torch.rand(3, 4, height, 2)
    found = drop_top_rows(maps, 0.33)
    for image, result in zip(maps, found, strict=True):
        activation = [max(sum(v.item() ** 2 for v in image[:, y, x]) for x in range(2)) for y in range(height)]
        top = sorted(range(height), key=activation.__getitem__)[height - dropped :]
        for y in range(height):
            assert torch.equal(result[:, y], torch.zeros(4, 2) if y in top else image[:, y])


def test_rows_are_dropped_only_in_training_and_only_for_the_feature_drop(model):
    images = torch.randint(256, (6, 3, 96, 48), dtype=torch.uint8)
    with torch.no_grad():
        kept = model.head_inputs({"images": images})
        model.training = True  # without the batch statistics of the submodules
        dropped = model.head_inputs({"images": images})
    for name in HEADS:
        assert torch.equal(kept[name], dropped[name]) == (name != "drop"), name


def multi_similarity(features, targets, *, alpha, beta, base, margin):
    """Compute the mean over all anchors of the multi-similarity loss (arXiv:1904.06627, eq. 14) of the mined pairs."""
    features = features / features.norm(dim=1, keepdim=True)
    total = torch.zeros(())
    for i in range(len(features)):
        similar = features @ features[i]
        positives = [similar[j] for j in range(len(features)) if j != i and targets[j] == targets[i]]
        negatives = [similar[j] for j in range(len(features)) if targets[j] != targets[i]]
        if not positives:
            continue
        hard_positives = [s for s in positives if s - margin < max(negatives)]
        hard_negatives = [s for s in negatives if s + margin > min(positives)]
        total += torch.log(1 + sum((-alpha * (s - base)).exp() for s in hard_positives)) / alpha
        total += torch.log(1 + sum((beta * (s - base)).exp() for s in hard_negatives)) / beta
    return total / len(features)


def test_losses_are_summed_over_seven_heads_and_three_features():
    losses = (
        "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'pml/MultiSimilarityLoss')", "MODEL.LOSSES.CE.SCALE", "0.5",
        "MODEL.LOSSES.PML.SCALE", "0.5", "MODEL.LOSSES.PML.MINER", "MultiSimilarityMiner", "MODEL.LOSSES.PML.ARGS",
        "{'MultiSimilarityLoss': {'alpha': 2, 'beta': 40, 'base': 0.5}, 'MultiSimilarityMiner': {'epsilon': 0.1}}",
    )  # fmt: skip
    model = build_model(config(*losses)).train()
    captured = {}
    for name in HEADS:
        model.get_submodule(f"{name}_head").register_forward_hook(
            lambda module, args, outputs, name=name: captured.__setitem__(name, (args[0], outputs))
        )
    found = model({"images": torch.randint(256, (6, 3, 64, 32), dtype=torch.uint8), "targets": TARGETS})
    expected = {f"loss_cls_{name}": cross_entropy_loss(captured[name][1]["cls_outputs"], TARGETS) / 2 for name in HEADS}
    for name in ("average", "drop", "whole"):
        before_neck = captured[name][0].flatten(1)
        value = multi_similarity(before_neck, TARGETS, alpha=2, beta=40, base=0.5, margin=0.1)
        expected[f"loss_multi_similarity_{name}"] = value / 2
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    sum(found.values()).backward()
    assert all(math.isfinite(p.grad.norm()) for p in model.parameters() if p.requires_grad)


def published(state):
    """Rename the tensors of a LightMBN as in the authors' files."""
    prefixes = {"drop_block.": "batch_drop_block.drop_batch_bottleneck."}
    modules = {name: f"reduction_{number}." for name, number in PUBLISHED.items()}
    modules |= {"first": "reduction_ch_0.", "second": "reduction_ch_1."}
    for name, module in modules.items():
        prefixes[f"reductions.{name}."] = f"{module}reduction."
        prefixes[f"{name}_head.bottleneck.0."] = f"{module}bn."
        prefixes[f"{name}_head."] = f"{module}classifier."
    renamed = {}
    for name, value in state.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        renamed[prefixes.get(old, "") + name.removeprefix(old)] = value
    return renamed


@pytest.mark.integration
def test_file_with_the_names_of_the_authors_loads_and_its_config_is_inferred(model):
    state = published(model.state_dict())
    assert "reduction_ch_1.classifier.weight" in state and "reduction_4.reduction.weight" in state
    other = build_model(config()).eval()
    report = load_model_state(other, state, source="x")
    assert not report.missing and not report.dropped
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    keys = infer_config(state, "file")
    inferred = build_model(get_cfg().with_values(keys | {"MODEL.DEVICE": "cpu"}))
    assert inferred.state_dict().keys() == other.state_dict().keys()
    assert keys["MODEL.META_ARCHITECTURE"] == "LightMBN" and keys["MODEL.HEADS.EMBEDDING_DIM"] == str(D)


def test_unsupported_backbone_width_or_loss_raises():
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.NAME.*build_osnet_ain_backbone"):
        build_model(config("MODEL.BACKBONE.NAME", "build_osnet_ain_backbone"))
    with pytest.raises(ConfigError, match="MODEL.HEADS.EMBEDDING_DIM"):
        build_model(config("MODEL.HEADS.EMBEDDING_DIM", "0"))
    with pytest.raises(ConfigError, match="CenterLoss.*LightMBN"):
        build_model(config("MODEL.LOSSES.NAME", "CenterLoss"))
