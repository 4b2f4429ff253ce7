"""Multi-process training on CUDA devices: NCCL and synchronized batch norm."""

import os
import subprocess
import sys
from pathlib import Path

import device_ranks
import pytest
import tiny
import torch

from fastamp.modeling import build_model

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cuda


def environment(root=""):
    path = os.pathsep.join(filter(None, [str(ROOT / "tests/helpers"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "FASTAMP_DATASETS": str(root)}


def test_cuda_training_with_one_or_two_ranks_matches_single_process(tmp_path):
    command = [sys.executable, device_ranks.__file__, str(tmp_path), "cuda", "syncBN"]
    subprocess.run(command, check=True, env=environment(), timeout=300)
    single, one, two = (torch.load(tmp_path / f"{count}.pth", weights_only=True) for count in (0, 1, 2))
    assert len(single) == device_ranks.STEPS
    for steps in (one, two):
        for expected, found in zip(single, steps, strict=True):
            assert expected.keys() == found.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    assert not torch.equal(single[0]["backbone.bn1.running_mean"], single[-1]["backbone.bn1.running_mean"])


def test_model_with_sync_bn_keeps_its_state_dict_keys(tmp_path):
    options = ("MODEL.HEADS.NUM_CLASSES", "4", "MODEL.BACKBONE.NAME", "build_resnet_backbone")
    options += ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.PRETRAIN", "False")
    norms = (("MODEL.BACKBONE.NORM", name, "MODEL.HEADS.NORM", name) for name in ("BN", "syncBN"))
    plain, synced = (build_model(tiny.tiny_config(tmp_path, *options, *norm)) for norm in norms)
    assert plain.state_dict().keys() == synced.state_dict().keys()
    assert sum(isinstance(module, torch.nn.SyncBatchNorm) for module in synced.modules()) == 21


def test_cuda_training_under_torchrun_with_one_process_saves_model(demo_root, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    options = tiny.tiny_options(tmp_path, "MODEL.DEVICE", "cuda", "SOLVER.AMP", "True", "SOLVER.MAX_EPOCH", "1")
    options += ["MODEL.BACKBONE.NAME", "build_resnet_backbone", "MODEL.BACKBONE.DEPTH", "18x"]
    options += ["MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.NORM", "syncBN"]
    process = subprocess.run(
        [*command, str(ROOT / "tools/train_net.py"), *options],
        capture_output=True, text=True, env=environment(demo_root), timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "model_final.pth").exists()
