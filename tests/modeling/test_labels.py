"""Training labels are checked on the host before they reach the device, if the model uses them as indices."""

import itertools

import every_backbone
import pytest
import tiny
import torch
from fake_cuda import fake_cuda, to_fake_cuda
from torch import nn

from fastamp.config import read_config
from fastamp.modeling import LOSS_REGISTRY, build_model
from fastamp.utils.errors import DataError

CLASSES = 4


class IgnoringLoss(nn.Module):
    """Custom cross-entropy loss that ignores images with label -1."""

    loss_name = "loss_ignoring"

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs["cls_outputs"], targets, ignore_index=-1)


def make_model(*opts, classes=CLASSES):
    cfg = read_config("", [*tiny.tiny_options("unused", "MODEL.HEADS.NUM_CLASSES", str(classes), *opts)])
    return build_model(cfg)


def make_batch(*labels):
    paths = [f"images/{number}.jpg" for number in range(len(labels))]
    images = torch.randint(256, (len(labels), 3, 64, 32), dtype=torch.uint8)
    return {"images": images, "targets": torch.tensor(labels), "img_paths": paths}


INDEXING = [
    ("CrossEntropyLoss", "Linear"),
    ("FocalLoss", "Linear"),
    ("CenterLoss", "Linear"),
    ("pml/ProxyAnchorLoss", "Linear"),
    ("TripletLoss", "ArcSoftmax"),
    ("TripletLoss", "CosSoftmax"),
    ("TripletLoss", "CircleSoftmax"),
]


def test_training_label_out_of_range_raises_data_error(subtests):
    for label, (loss, layer) in itertools.product([-1, CLASSES, -100], INDEXING):
        with subtests.test(label=label, loss=loss, layer=layer):
            if loss.startswith("pml/"):
                pytest.importorskip("pytorch_metric_learning")
            model = make_model("MODEL.LOSSES.NAME", f"('{loss}',)", "MODEL.HEADS.CLS_LAYER", layer)
            assert model(make_batch(0, 0, 3, 3))
            with pytest.raises(DataError) as raised:
                model(make_batch(0, 0, label, 3))
            words = (
                f"label {label} of images/2.jpg",
                "training set Demo",
                f"MODEL.HEADS.NUM_CLASSES is {CLASSES}",
                "1 of 4",
                "fix:",
            )
            assert all(word in str(raised.value) for word in words), raised.value


def test_labels_of_batch_without_image_paths_are_checked():
    batch = make_batch(0, 0, 9, 3)
    del batch["img_paths"]
    with pytest.raises(DataError, match="label 9 "):
        make_model()(batch)


@pytest.mark.parametrize("name", ["MGN", "MoCo", "Distiller"])
def test_mgn_moco_and_distiller_raise_data_error_for_label_out_of_range(name):
    opts = {
        "MGN": ["MODEL.BACKBONE.DEPTH", "50x", "MODEL.BACKBONE.FEAT_DIM", "2048", "MODEL.HEADS.EMBEDDING_DIM", "8"],
        "MoCo": ["MODEL.QUEUE_SIZE", "64"],
        "Distiller": ["KD.EMA.ENABLED", "True"],
    }[name]
    cfg = every_backbone.config("resnet 18x", "MODEL.META_ARCHITECTURE", name, *opts)
    model, classes = build_model(cfg), cfg.MODEL.HEADS.NUM_CLASSES
    with pytest.raises(DataError, match=f"label {classes} "):
        model.targets(make_batch(0, classes))


def test_labels_are_not_checked_if_no_module_uses_them_as_indices():
    model = make_model("MODEL.LOSSES.NAME", "('TripletLoss',)")
    assert model(make_batch(-1, -1, 7, 7))
    model.losses["loss_ignoring"] = IgnoringLoss()
    assert all(loss.isfinite() for loss in model(make_batch(-1, -1, 3, 3)).values())


def test_losses_that_use_labels_as_indices_declare_indexes_classes():
    """Without the label check, a label out of range fails in exactly the losses that declare the attribute."""
    for name in LOSS_REGISTRY:
        if name == "ClothesAdversarialLoss" or not LOSS_REGISTRY.get(name).__module__.startswith("fastamp."):
            continue  # registered by another test
        model = make_model("MODEL.LOSSES.NAME", f"('{name}',)")
        declared = any(getattr(module, "indexes_classes", False) for module in model.modules())
        model.set_label_range(0, ())  # disables the check
        try:
            model(make_batch(0, 0, CLASSES, CLASSES))
            fails = False
        except (IndexError, RuntimeError):
            fails = True
        assert declared == fails, name


def test_label_check_does_not_read_labels_from_the_device(monkeypatch):
    model = make_model()
    with fake_cuda(monkeypatch) as reads:
        to_fake_cuda(model)
        batch = make_batch(0, 0, 3, 3)
        model(batch)
        assert reads.count == 0
        model(batch | {"targets": batch["targets"].to(model.device)})
        assert reads.count == 0
        with pytest.raises(DataError, match="label 4 "):
            model(make_batch(0, 0, 4, 3))


def test_labels_are_not_checked_in_model_without_classes():
    model = make_model(classes=0)
    assert len(model.eval()(make_batch(7, 8))) == 2
