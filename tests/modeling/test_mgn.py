"""MGN: branches, horizontal parts and loss weights."""

import pytest
import tiny
import torch

from fastamp.checkpoint.load_state import load_model_state
from fastamp.config import read_config
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import infer_config
from fastamp.modeling.losses import cross_entropy_loss, triplet_loss
from fastamp.modeling.meta_arch.mgn import HEADS
from fastamp.utils.errors import ConfigError, WeightsError

TARGETS = torch.tensor([0, 0, 1, 1])


def config(*opts):
    return read_config("", [
        "MODEL.META_ARCHITECTURE", "MGN", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.DEPTH", "18x",
        "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.HEADS.EMBEDDING_DIM", "8", "MODEL.HEADS.NUM_CLASSES", "2",
        "MODEL.HEADS.WITH_BNNECK", "True", "MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss')", *opts,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_model(config())


def test_mgn_branches_share_initial_weights_and_split_maps_into_parts(model):
    for branch in ("b2", "b3"):
        for name, value in model.get_submodule(branch).state_dict().items():
            assert torch.equal(value, model.b1.state_dict()[name])
    batch = {"images": torch.randint(256, (2, 3, 96, 32), dtype=torch.uint8)}
    model.eval()
    with torch.no_grad():
        features = model(batch)
        maps = model.b3(model.feature_maps(batch))  # height 96 / 16
        middle = model.b32_head(maps[:, :, 2:4])
    assert features.shape == (2, 8 * 8)
    position = 8 * HEADS.index("b32")
    torch.testing.assert_close(features[:, position : position + 8], middle)


def test_mgn_averages_classification_losses_over_heads_and_triplet_losses_over_features(model):
    model.train()
    batch = {"images": torch.randint(256, (4, 3, 96, 32), dtype=torch.uint8), "targets": TARGETS}
    captured = {}
    hooks = [
        model.get_submodule(f"{name}_head").register_forward_hook(
            lambda module, args, outputs, name=name: captured.__setitem__(name, outputs)
        )
        for name in HEADS
    ]
    losses = model(batch)
    for hook in hooks:
        hook.remove()
    expected = {f"loss_cls_{name}": cross_entropy_loss(captured[name]["cls_outputs"], TARGETS) / 8 for name in HEADS}
    parts = {"b1": ["b1"], "b2": ["b2"], "b3": ["b3"], "b22": ["b21", "b22"], "b33": ["b31", "b32", "b33"]}
    for name, branch_parts in parts.items():
        features = torch.cat([captured[part]["features"] for part in branch_parts], dim=1)
        expected[f"loss_triplet_{name}"] = triplet_loss(features, TARGETS, hard_mining=False) / 5
    assert losses.keys() == expected.keys()
    for name, value in losses.items():
        torch.testing.assert_close(value, expected[name])


def test_mgn_branches_2_and_3_have_stride_1_in_last_stage():
    model = build_model(config("MODEL.BACKBONE.LAST_STRIDE", "2")).eval()
    with torch.no_grad():
        trunk = model.feature_maps({"images": torch.zeros(1, 3, 128, 64)})
        assert model.b1(trunk).shape[2:] == (4, 2)
        assert model.b2(trunk).shape[2:] == model.b3(trunk).shape[2:] == (8, 4)


def test_loading_weights_between_mgn_and_baseline_raises(model):
    other = build_model(config("MODEL.META_ARCHITECTURE", "Baseline"))
    for one, state, message in (
        (other, model, "weights are of MODEL.META_ARCHITECTURE MGN"),
        (model, other, "weights are not of MODEL.META_ARCHITECTURE MGN"),
    ):
        with pytest.raises(WeightsError, match=message):
            load_model_state(one, state.state_dict(), source="x")


def test_mgn_raises_for_unsupported_backbone_loss_or_image_size():
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.NAME.*build_tiny_backbone"):
        build_model(config("MODEL.BACKBONE.NAME", "build_tiny_backbone", "MODEL.BACKBONE.FEAT_DIM", str(tiny.WIDTH)))
    with pytest.raises(ConfigError, match="CenterLoss.*MGN"):
        build_model(config("MODEL.LOSSES.NAME", "CenterLoss"))
    with pytest.raises(ConfigError, match=r"\b3 .*\b2\b"):
        build_model(config()).eval()({"images": torch.zeros(1, 3, 32, 32)})


@pytest.mark.integration
def test_extra_bn_normalizes_the_map_of_each_branch():
    plain, normed = build_model(config()), build_model(config("MODEL.BACKBONE.EXTRA_BN", "True"))
    names = {name.split(".")[0] for name in normed.state_dict().keys() - plain.state_dict().keys()}
    assert names == {"heads_extra_bn_b1", "heads_extra_bn_b2", "heads_extra_bn_b3"}
    normed.load_state_dict(plain.state_dict(), strict=False)
    for branch, scale in (("b1", 2.0), ("b2", 3.0), ("b3", 4.0)):
        norm = normed.get_submodule(f"heads_extra_bn_{branch}")
        torch.nn.init.constant_(norm.weight, scale)
        plain.get_submodule(branch).register_forward_hook(
            lambda _, __, maps, norm=norm: torch.nn.functional.batch_norm(
                maps, norm.running_mean, norm.running_var, norm.weight, norm.bias
            )
        )
    images = torch.rand(2, 3, 96, 48) * 255
    with torch.no_grad():
        torch.testing.assert_close(normed.eval()(images), plain.eval()(images))
    assert infer_config(normed.state_dict(), "file")["MODEL.BACKBONE.EXTRA_BN"] == "True"
