"""Model inputs: a batch, or a tensor of images in evaluation mode."""

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from fastamp.modeling import META_ARCH_REGISTRY, build_model
from fastamp.modeling.meta_arch import Baseline

IMAGES = torch.randint(256, (4, 3, 96, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
KINDS = {
    "Baseline": (),
    "MoCo": ("MODEL.QUEUE_SIZE", "20"),
    "Distiller": ("KD.EMA.ENABLED", "True"),
    "MGN": ("MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM",
            "512", "MODEL.HEADS.EMBEDDING_DIM", "8"),
    "LightMBN": ("MODEL.BACKBONE.NAME", "build_osnet_backbone", "MODEL.BACKBONE.DEPTH", "x0_25",
                 "MODEL.BACKBONE.FEAT_DIM", "128", "MODEL.HEADS.EMBEDDING_DIM", "8"),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    opts = ("MODEL.META_ARCHITECTURE", request.param, "MODEL.HEADS.NUM_CLASSES", "4", *KINDS[request.param])
    torch.manual_seed(0)
    return build_model(tiny.tiny_config("unused", *opts))


def test_model_computes_same_features_from_image_tensor_and_batch_dict(model):
    model.eval()
    with torch.no_grad():
        expected = model({"images": IMAGES})
        for images in (IMAGES, IMAGES.float()):
            assert torch.equal(model(images), expected)
    assert expected.shape[0] == 4 and expected.dtype == torch.float32


def test_model_in_training_mode_raises_without_targets(model):
    model.train()
    with pytest.raises(TypeError, match=rf"{type(model).__name__} (.|\n)*model\.eval\(\)"):
        model(IMAGES)
    with pytest.raises(KeyError, match=r"targets"):
        model({"images": IMAGES})
    assert all(loss.isfinite() for loss in model({"images": IMAGES, "targets": torch.tensor([0, 0, 1, 1])}).values())


def test_model_raises_for_inputs_without_valid_images(model, subtests):
    cases = [
        (IMAGES.numpy(), TypeError, "ndarray"),
        ([IMAGES], TypeError, "list"),
        ("a.jpg", TypeError, r"Predictor\(checkpoint\)\.features\(paths\)"),
        (None, TypeError, "NoneType"),
        ({"image": IMAGES}, KeyError, '"images".*image'),
        (IMAGES[0], ValueError, r"\(B, 3, H, W\).*\(3, 96, 32\)"),
        (IMAGES.permute(0, 2, 3, 1), ValueError, r"permute\(0, 3, 1, 2\)"),
        (IMAGES[:, :1], ValueError, r"\(4, 1, 96, 32\)"),
        ({"images": np.zeros((4, 3, 8, 8))}, ValueError, r"\(4, 3, 8, 8\)"),
        ({"images": [1]}, ValueError, "list"),
    ]
    for batch, error, message in cases:
        with subtests.test(error=error, message=message):
            for mode in (True, False):
                model.train(mode)
                if mode and isinstance(batch, torch.Tensor):
                    continue
                with pytest.raises(error, match=message):
                    model(batch)


class Means(nn.Module):
    def forward(self, maps, targets=None):
        return maps.mean((2, 3))


class WithOwnHead(Baseline):
    def __init__(self, **options):
        super().__init__(**options)
        self.heads = Means()


class WithOwnBackbone(WithOwnHead):
    def __init__(self, **options):
        super().__init__(**options)
        self.backbone = nn.Conv2d(3, 512, 8, stride=8)


class WithTrunks(nn.Module):
    takes_config = True

    def __init__(self, cfg):
        super().__init__()
        self.trunks = nn.ModuleList([nn.Conv2d(3, 512, 8, stride=8)])  # named like a member of the contract

    def forward(self, batch):
        for trunk in self.trunks:
            maps = trunk(batch["images"].float())
        return maps.mean((2, 3))


@pytest.mark.parametrize("kind", [WithOwnHead, WithOwnBackbone, WithTrunks])
def test_model_with_modules_without_the_members_of_contracts(kind, monkeypatch):
    monkeypatch.setattr(META_ARCH_REGISTRY, "_components", {**META_ARCH_REGISTRY._components})
    META_ARCH_REGISTRY.register()(kind)
    opts = ("MODEL.META_ARCHITECTURE", kind.__name__, *KINDS["MGN"])
    model = build_model(tiny.tiny_config("unused", *opts)).eval()
    assert model({"images": IMAGES}).shape == (4, 512)
    assert not {"trunks", "frames"} & vars(kind).keys()
