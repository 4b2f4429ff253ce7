"""The trainer sets the number of images of each class in the classification layer."""

import numpy as np
import pytest
import torch
from tiny import tiny_config

from fastamp.engine import DefaultTrainer

OPTIONS = ["MODEL.HEADS.CLS_LAYER", "SubCenterArcSoftmax", "MODEL.HEADS.MARGIN", "0.5", "MODEL.HEADS.SCALE", "30"]


def test_trainer_sets_margins_by_the_training_images_of_each_class(demo, tmp_path):
    images = ["DATASETS.NAMES", f"('csv:{tmp_path}/a.csv',)"]
    source = DefaultTrainer.build_train_loader(tiny_config(tmp_path)).dataset
    rows = [row for row in range(len(source)) if source.labels[row] or row % 3]  # class 0 has fewer images
    lines = [f"{source.items.path(row)},{source.labels[row]},train" for row in rows]
    (tmp_path / "a.csv").write_text("\n".join(["path,pid,split", *lines]))
    trainer = DefaultTrainer(tiny_config(tmp_path / "run", *OPTIONS, *images))
    layer, counts = trainer.model.heads.cls_layer, np.bincount(trainer.data_loader.dataset.labels)
    assert trainer.model.heads.weight.shape[0] == 2 * len(counts)
    assert len(set(counts.tolist())) > 1
    rarity = torch.tensor(counts).double().pow(-0.25)
    expected = 0.2 + 0.3 * (rarity - rarity.min()) / (rarity.max() - rarity.min())
    assert layer.margins.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert "heads.cls_layer.margins" in trainer.model.state_dict()


def test_weights_with_margins_load_into_a_model_without_classes(demo, tmp_path):
    trainer = DefaultTrainer(tiny_config(tmp_path / "run", *OPTIONS))
    path = trainer.checkpointer.save("a")
    cfg = tiny_config(tmp_path / "other", *OPTIONS, "MODEL.WEIGHTS", str(path))
    assert DefaultTrainer.test_weights(cfg)["mAP"] > 0
