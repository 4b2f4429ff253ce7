"""The device of a config in which MODEL.DEVICE was not set."""

import logging

import pytest
import tiny
import torch

from fastamp.amp import requested_device, resolve_device
from fastamp.config import get_cfg, read_config
from fastamp.data import build_reid_train_loader
from fastamp.data.custom_loader import as_train_loader
from fastamp.engine import default_setup
from fastamp.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_unset_device_is_replaced_and_a_set_device_is_not(tmp_path):
    cfg = get_cfg()
    assert requested_device(cfg) == "auto" and cfg.MODEL.DEVICE == "cuda"
    cfg.merge_from_list(["MODEL.DEVICE", "cuda"])
    assert requested_device(cfg) == "cuda"
    with pytest.raises(ConfigError, match="MODEL.DEVICE is 'cuda'"):
        resolve_device(requested_device(cfg))
    (tmp_path / "x.yml").write_text("MODEL: {DEVICE: cuda}\n")
    from_file, assigned = get_cfg(), get_cfg()
    from_file.merge_from_file(tmp_path / "x.yml")
    assigned.MODEL.DEVICE = "cuda"
    assert requested_device(from_file) == requested_device(assigned) == "cuda"


def test_unset_device_stays_unset_in_copies_and_merged_configs(monkeypatch):
    cfg = get_cfg()
    cfg.SEED = 3
    other = get_cfg()
    other.merge_from_other_cfg(cfg)
    assert other.SEED == 3 and other.is_set("SEED") and not other.is_set("MODEL.DEVICE")
    stored = get_cfg()
    stored.merge_saved(cfg.dump())
    for config in (other, stored, cfg.clone(), cfg.with_values({"SEED": 4})):
        assert requested_device(config) == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert requested_device(cfg) == "cuda"


def test_setup_logs_one_line_about_the_device_that_replaces_cuda(demo, tmp_path, caplog):
    options = tiny.tiny_options(tmp_path)
    assert options[:2] == ["MODEL.DEVICE", "cpu"]
    cfg = read_config("", options[2:])
    handler, logger = caplog.handler, logging.getLogger("fastamp.engine.setup")
    logger.addHandler(handler)
    try:
        default_setup(cfg)
    finally:
        logger.removeHandler(handler)
    lines = [record.getMessage() for record in caplog.records if "MODEL.DEVICE is not set" in record.getMessage()]
    assert len(lines) == 1 and resolve_device("auto").type in lines[0]


def test_plain_loader_of_a_trainer_needs_no_device(demo, tmp_path):
    """A ``DataLoader`` that ``build_train_loader`` returns is wrapped for the device that replaces cuda."""
    cfg = read_config("", tiny.tiny_options(tmp_path)[2:])
    dataset = build_reid_train_loader(cfg).dataset
    wrapped = as_train_loader(torch.utils.data.DataLoader(dataset, batch_size=16), cfg)
    assert not cfg.is_set("MODEL.DEVICE") and wrapped.iters_per_epoch == 6
