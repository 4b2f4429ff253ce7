"""Similarity maps: models whose exact map is known, and each kind of backbone."""

import pytest
import torch
from torch import nn

from fastamp.modeling.backbones import vmamba
from fastamp.modeling.backbones.swin import Depth, Swin
from fastamp.modeling.backbones.timm_vit import TimmVisionTransformer
from fastamp.modeling.backbones.vit import DEPTHS, VisionTransformer
from fastamp.report.similarity_map import similarity_map
from fastamp.utils.errors import ConfigError


class Model(nn.Module):
    """Model with a backbone and a ``head``, which defaults to average pooling."""

    def __init__(self, backbone, head=lambda maps: maps.mean((2, 3))):
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, batch):
        return self.head(self.backbone(batch["images"].float() / 255))


def pair(height=64, width=32):
    return {"images": torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8)}


def test_similarity_map_of_linear_model_equals_contribution_of_each_position():
    """With a linear backbone and average pooling, the similarity is a sum of one contribution per position."""
    model, batch = Model(nn.Conv2d(3, 8, 8, stride=8)).eval(), pair()
    found = similarity_map(model, batch)
    maps = model.backbone(batch["images"].float() / 255).detach()
    features = maps.mean((2, 3))
    for number in range(2):
        added = torch.einsum("chw,c->hw", maps[number], features[1 - number]).clamp_min(0)
        torch.testing.assert_close(torch.from_numpy(found.maps[number]), added / added.max())
    assert found.similarity == pytest.approx(torch.cosine_similarity(*features[:, None]).item(), abs=1e-6)
    assert found.images[0].shape == (64, 32, 3)


def test_similarity_map_highlights_the_common_pattern():
    """The two images are black, except for the same mark at different positions."""
    batch = {"images": torch.zeros(2, 3, 64, 32)}
    batch["images"][0, :, 8:16, 8:16] = batch["images"][1, :, 40:48, 16:24] = 255
    found = similarity_map(Model(nn.Conv2d(3, 8, 8, stride=8, bias=False)).eval(), batch)
    assert found.similarity == pytest.approx(1, abs=1e-5)
    assert [divmod(int(heat.argmax()), 4) for heat in found.maps] == [(1, 1), (5, 2)]
    assert all((heat > 0).sum() == 1 for heat in found.maps)


@pytest.mark.parametrize("frozen", [False, True])
def test_similarity_map_supports_vit_swin_and_vmamba(frozen):
    vit = VisionTransformer(depth=DEPTHS["deit_small"], image_size=(64, 32))
    vit.blocks = vit.blocks[:2]
    swin = Swin(Depth(24, (1, 1, 1, 1), (1, 1, 1, 1), ""))
    mamba = vmamba.VMamba(vmamba.Depth(8, (1, 1, 1, 1), 1))
    for backbone, shape in ((vit, (4, 2)), (swin, (2, 1)), (mamba, (4, 2))):
        model = Model(backbone).eval().requires_grad_(not frozen)
        found = similarity_map(model, pair())
        assert all(heat.shape == shape and heat.max() <= 1 and (heat >= 0).all() for heat in found.maps)
        assert max(heat.max() for heat in found.maps) == 1
        assert not backbone._forward_hooks and all(p.grad is None for p in model.parameters())


def test_similarity_map_raises_without_spatial_features():
    model = Model(nn.Sequential(nn.Conv2d(3, 8, 8), nn.AdaptiveAvgPool2d(1)))
    with pytest.raises(ConfigError, match=r"(?s)Sequential.*\(8, 1, 1\).*fix: .*--kind"):
        similarity_map(model.eval(), pair())


@pytest.mark.parametrize("name", ["test_vit", "vit_small_patch16_dinov3"])
def test_similarity_map_of_a_timm_vit_has_its_grid_also_with_jpm(name):
    timm = pytest.importorskip("timm")
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2}
    for jpm in (False, True):
        model = timm.create_model(name, num_classes=0, img_size=(64, 32), dynamic_img_size=True, **sizes)
        backbone = TimmVisionTransformer(model, stride=(16, 16))
        for parameter in backbone.parameters():
            nn.init.normal_(parameter, std=0.2)
        last = backbone.hand_over_last_block() if jpm else nn.Identity()
        head = (lambda tokens, last=last: last(tokens)[:, 0]) if jpm else (lambda maps: maps.flatten(1))
        found = similarity_map(Model(backbone, head).eval(), pair())
        assert all(heat.shape == (4, 2) for heat in found.maps) and max(heat.max() for heat in found.maps) == 1
