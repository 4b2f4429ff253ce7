"""FastTune: loaders of the training and validation splits."""

from autotuner.split import register_split

from fastamp.config import get_cfg
from fastamp.data import build_reid_test_loader, build_reid_train_loader


def test_data_loaders_accept_dataset_names_of_registered_validation_split(demo):
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.IMS_PER_BATCH", "8", "DATALOADER.NUM_WORKERS", "0", "MODEL.DEVICE", "cpu"])
    cfg.DATASETS.NAMES = ("Demo",)
    names = register_split(cfg, 0.25, 0)
    assert register_split(cfg, 0.25, 0) == names
    cfg.DATASETS.NAMES, cfg.DATASETS.TESTS = (names[0],), (names[1],)
    train = build_reid_train_loader(cfg)
    test, num_query = build_reid_test_loader(cfg, names[1])
    assert train.dataset.num_classes == 12 and 0 < num_query < len(test.dataset)
