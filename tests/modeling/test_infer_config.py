"""infer_config: backbones that cannot be built, and unknown weights."""

from types import SimpleNamespace

import pytest
import torch

from fastamp.config import read_config
from fastamp.modeling.backbones import BACKBONE_REGISTRY
from fastamp.modeling.infer_config import backbone_prefixes, infer_config
from fastamp.utils.errors import WeightsError

pytestmark = pytest.mark.integration


@pytest.fixture
def unavailable_backbone(monkeypatch):
    """Register a backbone that requires a package that is not installed."""

    def build(cfg):
        raise ImportError("No module named 'absent_package'")

    build.variants = SimpleNamespace(depths=("small",), options=(), keys_of=lambda trunk: {})
    monkeypatch.setitem(BACKBONE_REGISTRY._components, "build_unavailable_backbone", build)


def test_infer_config_skips_registered_backbone_that_cannot_be_built(unavailable_backbone, caplog):
    cfg = read_config("", ["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.WITH_IBN", "False"])
    with torch.device("meta"):
        backbone = BACKBONE_REGISTRY.build("build_resnet_backbone", cfg)
    state = {f"backbone.{name}": value for name, value in backbone.state_dict().items()}
    keys = infer_config(state, "weights.pth")
    assert keys["MODEL.BACKBONE.NAME"] == "build_resnet_backbone" and keys["MODEL.BACKBONE.DEPTH"] == "18x"
    assert "build_unavailable_backbone" in caplog.text and "absent_package" in caplog.text
    assert backbone_prefixes(state) == {"backbone.": "resnet"}


def test_infer_config_raises_if_no_backbone_matches_weights(unavailable_backbone):
    with pytest.raises(WeightsError, match="weights.pth"):
        infer_config({"encoder.0.weight": torch.zeros(3, 3)}, "weights.pth")
