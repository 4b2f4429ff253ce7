"""Tests of the consistency checks of config values in distributed runs."""

import pytest
import tiny

from fastamp.diagnostics.config_check import check_config
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError


@pytest.mark.parametrize(
    "options, key",
    [
        (("MODEL.BACKBONE.NORM", "syncBN"), "MODEL.BACKBONE.NORM"),
        (("MODEL.HEADS.NORM", "SyncBN"), "MODEL.HEADS.NORM"),
        (("MODEL.DEVICE", "cuda:0"), "MODEL.DEVICE"),
    ],
)
def test_config_values_unsuitable_for_distributed_runs_raise(tmp_path, monkeypatch, options, key):
    cfg = tiny.tiny_config(tmp_path, *options)
    check_config(cfg)
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=key):
        check_config(cfg)
