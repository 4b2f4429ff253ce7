"""Hash of a model, which decides whether features can be compared."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from fastamp.config import CfgNode
from fastamp.data.transforms import Resize

# Config keys that determine the features, in addition to the weights.
_KEYS_OF_FEATURES = (
    *("MODEL.META_ARCHITECTURE", "MODEL.BACKBONE", "MODEL.HEADS", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"),
    *("INPUT.SIZE_TEST", "INPUT.CHANNELS", "INPUT.BIT_DEPTH", "INPUT.DECODE_REDUCED", "TEST.FLIP"),
)


def hash_of_features(cfg: CfgNode, state: Mapping[str, Any], resize: Resize) -> str:
    """Hash the weights and all settings that affect the features.

    Args:
        cfg: config of the model.
        state: its state dict.
        resize: transform of its images.

    Returns:
        16 hex digits.
    """
    digest = hashlib.blake2b(digest_size=8)
    # Without default values, so that hashes stay valid when a release adds a key.
    defaults = {key.path: key.default for key, _ in cfg.keys_below()}
    values = {path: value for path, value in feature_values(cfg).items() if value != defaults[path]}
    values |= {"crop": resize.crop, "interpolation": resize.interpolation}
    digest.update(repr(sorted(values.items())).encode())
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def feature_values(cfg: CfgNode) -> dict[str, Any]:
    """Return the values of the config keys that determine the features, in addition to the weights."""
    excluded = {"MODEL.BACKBONE.PRETRAIN", "MODEL.BACKBONE.PRETRAIN_PATH", "MODEL.HEADS.NUM_CLASSES"}
    # Whether the bias of the neck is trained does not matter, only its value. Dropout and MixStyle are for training.
    excluded |= {"MODEL.HEADS.NECK_BIAS", "MODEL.BACKBONE.DROPOUT"}
    excluded |= {"MODEL.BACKBONE.MIXSTYLE", "MODEL.BACKBONE.MIXSTYLE_PROB", "MODEL.BACKBONE.MIXSTYLE_ALPHA"}
    # Describes images, not the model: features of visible and infrared images are compared with each other.
    excluded |= {"MODEL.BACKBONE.MODALITY"}
    # Features of single images do not depend on the pooling of frames and on the classifier.
    excluded |= {"MODEL.HEADS.TEMPORAL_POOL", "MODEL.HEADS.SUBCENTERS.NUMBER", "MODEL.HEADS.SUBCENTERS.MIN_MARGIN"}
    excluded |= {"MODEL.HEADS.PFC.ENABLED", "MODEL.HEADS.PFC.SAMPLE_RATE", "MODEL.HEADS.FILTER_ABOVE"}
    values = {key.path: value for key, value in cfg.keys_below() if key.path.startswith(_KEYS_OF_FEATURES)}
    return {path: value for path, value in values.items() if path not in excluded}
