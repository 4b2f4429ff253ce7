"""DDP broadcasts only the buffers that can differ between ranks, and trains as DDP with its defaults does."""

import subprocess
import sys
import warnings
from pathlib import Path

import every_backbone
import pytest
import tiny
import torch
import torch.distributed as dist
from torch import nn

from fastamp.config import read_config
from fastamp.layers.norm import build_norm
from fastamp.modeling import build_model
from fastamp.utils import comm

HELPER = Path(__file__).parents[1] / "helpers/data_parallel_ranks.py"


class Recorded(nn.Module):
    """Replacement of DDP that records its arguments and the buffers that DDP would broadcast."""

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )

    def __init__(self, model, **options):
        super().__init__()
        ignored = model._ddp_params_and_buffers_to_ignore
        self.broadcast = [name for name, _ in model.named_buffers() if name not in ignored]
        self.options = options


@pytest.fixture
def wrap(monkeypatch):
    monkeypatch.setattr(comm, "is_distributed", lambda: True)
    monkeypatch.setattr(comm, "DistributedDataParallel", Recorded)
    return comm.data_parallel


def tiny_model(*opts):
    cfg = read_config("", tiny.tiny_options("unused", "MODEL.HEADS.NUM_CLASSES", "4", *opts))
    return build_model(cfg)


def test_only_batch_norm_statistics_are_broadcast(wrap):
    wrapped = wrap(tiny_model())
    layers = ("backbone.1", "backbone.5", "heads.bottleneck.0")
    assert wrapped.broadcast == [f"{layer}.running_{name}" for layer in layers for name in ("mean", "var")]
    assert wrapped.options == {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("norm", ["GN", "FrozenBN", "syncBN"])
def test_nothing_is_broadcast_without_statistics_of_one_rank(norm, wrap):
    opts = ("MODEL.BACKBONE.NORM", norm, "MODEL.HEADS.NORM", norm, "MODEL.HEADS.EMBEDDING_DIM", "32")
    wrapped = wrap(build_model(every_backbone.config("resnet 18x", *opts)))
    assert wrapped.broadcast == []
    assert wrapped.options == {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("backbone", ["vit deit_small", "swin t"])
def test_nothing_is_broadcast_for_transformers_without_batch_norm(backbone, wrap):
    names = [name for name in every_backbone.BACKBONES if name.startswith(backbone)] or [backbone]
    model = build_model(every_backbone.config(names[0], "MODEL.HEADS.WITH_BNNECK", "False"))
    wrapped = wrap(model)
    assert wrapped.broadcast == []


def test_buffers_of_unknown_modules_are_broadcast(wrap):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("seen", torch.zeros(3))
    wrapped = wrap(model)
    assert wrapped.broadcast == ["0.seen"]


def test_momentum_encoder_broadcasts_its_statistics_only(wrap):
    opts = ("MODEL.META_ARCHITECTURE", "MoCo", "MODEL.QUEUE_SIZE", "64")
    broadcast = wrap(build_model(every_backbone.config("resnet 18x", *opts))).broadcast
    assert all(name.endswith(("running_mean", "running_var")) for name in broadcast)
    assert any(name.startswith("key_encoder.") for name in broadcast)


@pytest.mark.integration
def test_training_equals_ddp_with_its_defaults_and_equal_buffers_are_equal(tmp_path):
    """Two ranks with batch norm, accumulation and a skipped step: parameters and buffers are bit-identical."""
    done = subprocess.run([sys.executable, str(HELPER), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        ours, default = (torch.load(tmp_path / f"{kind}_{rank}.pth", weights_only=True) for kind in ("ours", "default"))
        assert ours.keys() == default.keys()
        assert all(torch.equal(value, default[name]) for name, value in ours.items())
    first, second = (torch.load(tmp_path / f"ours_{rank}.pth", weights_only=True) for rank in (0, 1))
    differing = {name for name, value in first.items() if not torch.equal(value, second[name])}
    # Negative control: each rank computes its own statistics.
    assert differing and all(name.endswith(("running_mean", "running_var")) for name in differing)


@pytest.mark.parametrize("norm, broadcasts", [("GN", False), ("BN", True)])
def test_ddp_broadcasts_before_a_forward_pass_only_if_buffers_can_differ(norm, broadcasts, tmp_path, monkeypatch):
    """DDP itself, in a process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        monkeypatch.setattr(comm, "is_distributed", lambda: True)
        model = nn.Sequential(nn.Conv2d(3, 32, 1), build_norm(norm, 32))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapped = comm.data_parallel(model)
        assert wrapped.will_sync_module_buffers() == broadcasts
    finally:
        dist.destroy_process_group()
