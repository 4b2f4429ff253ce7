"""Modules and functions of FastReID that forks import, in addition to those in ``fastreid_imports.txt``."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastamp.fastreid.config import get_cfg
from fastamp.utils.errors import ConfigError

NAMES = {
    "data.datasets.AirportALERT": "AirportALERT",
    "data.datasets.caviara": "CAVIARa",
    "data.datasets.cuhk_sysu": "cuhkSYSU",
    "data.datasets.dukemtmcreid": "DukeMTMC",
    "data.datasets.grid": "GRID",
    "data.datasets.iLIDS": "iLIDS",
    "data.datasets.lpw": "LPW",
    "data.datasets.pes3d": "PeS3D",
    "data.datasets.pku": "PKU",
    "data.datasets.prai": "PRAI",
    "data.datasets.prid": "PRID",
    "data.datasets.saivt": "SAIVT",
    "data.datasets.shinpuhkan": "Shinpuhkan",
    "data.datasets.sysu_mm": "SYSU_mm",
    "data.datasets.thermalworld": "Thermalworld",
    "data.datasets.wildtracker": "WildTrackCrop",
    "evaluation": "inference_context",
    "evaluation.evaluator": "inference_context",
    "evaluation.reid_evaluation": "ReidEvaluator",
    "evaluation.rerank": "re_ranking",
    "layers": "AdaptiveAvgMaxPool ClipGlobalAvgPool FastGlobalAvgPool Flatten GeneralizedMeanPooling Identity "
    "GeneralizedMeanPoolingP GlobalAvgPool GlobalMaxPool SyncBatchNorm FrozenBatchNorm drop_path trunc_normal_",
    "layers.batch_norm": "IBN get_norm",
    "layers.helpers": "make_divisible to_2tuple",
    "layers.se_layer": "SELayer",
    "modeling.backbones.mobilenetv3": "MobileNetV3",
    "modeling.backbones.vision_transformer": "VisionTransformer",
    "modeling.losses.circle_loss": "pairwise_circleloss pairwise_cosface",
    "modeling.losses.cross_entroy_loss": "cross_entropy_loss",
    "utils.comm": "get_local_size",
}


def test_name_exists(subtests):
    for path, names in NAMES.items():
        for name in names.split():
            with subtests.test(f"{path} {name}"):
                assert getattr(importlib.import_module(f"fastamp.fastreid.{path}"), name) is not None


def test_module_of_a_loss_does_not_replace_the_function():
    from fastamp.fastreid.modeling import losses
    from fastamp.fastreid.modeling.losses.focal_loss import focal_loss
    from fastamp.fastreid.modeling.losses.triplet_loss import triplet_loss

    features, targets = torch.randn(8, 4), torch.arange(8) // 2
    assert losses.triplet_loss is triplet_loss and losses.focal_loss is focal_loss
    assert losses.triplet_loss(features, targets, 0.3, False, True) > 0


@pytest.mark.parametrize("module", ["layers", "layers.activation"])
def test_activations_keep_the_shape(module):
    layers = importlib.import_module(f"fastamp.fastreid.{module}")
    for name in ("Mish", "Swish", "MemoryEfficientSwish", "GELU"):
        assert getattr(layers, name)()(torch.ones(2, 3)).shape == (2, 3)


def test_non_local_takes_fastreids_arguments():
    from fastamp.fastreid.layers.non_local import Non_local

    x = torch.randn(2, 8, 4, 2)
    assert torch.equal(Non_local(8, "BN", 2)(x), x)  # the norm's weight is 0


def test_drop_path_drops_whole_samples():
    from fastamp.fastreid.layers.drop import DropPath

    torch.manual_seed(0)
    found = DropPath(0.5)(torch.ones(64, 3))
    assert set(found.flatten().tolist()) == {0.0, 2.0} and (found == found[:, :1]).all()
    assert torch.equal(DropPath()(torch.ones(2, 3)), torch.ones(2, 3))


@pytest.mark.parametrize("name", ["resnet", "osnet"])
def test_backbone_function_builds_the_registered_backbone(name):
    backbones = importlib.import_module("fastamp.fastreid.modeling.backbones")
    values = {"MODEL.BACKBONE.DEPTH": "18x" if name == "resnet" else "x0_25", "MODEL.BACKBONE.PRETRAIN": False}
    maps = getattr(backbones, f"build_{name}_backbone")(get_cfg().with_values(values))(torch.zeros(1, 3, 64, 32))
    assert maps.dim() == 4


def test_timer_excludes_pauses():
    from fastamp.fastreid.utils.timer import Timer

    timer = Timer()
    timer.pause()
    stopped = timer.seconds()
    assert timer.is_paused() and timer.seconds() == stopped >= 0
    with pytest.raises(ValueError):
        timer.pause()
    timer.resume()
    assert not timer.is_paused() and timer.seconds() >= stopped
    with pytest.raises(ValueError):
        timer.resume()


def test_seed_all_rng_repeats_random_numbers():
    from fastamp.fastreid.utils.env import seed_all_rng

    seed_all_rng(3)
    first = torch.rand(2), np.random.rand()
    seed_all_rng(3)
    assert torch.equal(first[0], torch.rand(2)) and first[1] == np.random.rand()
    seed_all_rng()


@pytest.mark.integration
def test_environment_names_the_version_of_pytorch():
    from fastamp.fastreid.utils.collect_env import collect_env_info

    assert torch.__version__ in collect_env_info()


@pytest.mark.integration
def test_processes_of_launch_have_local_ranks(tmp_path):
    (tmp_path / "ranks.py").write_text(
        "from fastreid.engine import launch\n"
        "from fastreid.utils import comm\n"
        "def main():\n"
        "    print(f'LOCAL {comm.get_local_rank()} {comm.get_local_size()}\\n', end='', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    launch(main, 2, 1, 0, 'auto')\n"
    )
    command = [sys.executable, "-m", "fastamp.fastreid", str(tmp_path / "ranks.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert sorted(found.stdout.splitlines()) == ["LOCAL 0 2", "LOCAL 1 2"], found.stderr


def test_precise_batch_norm_computes_the_mean_of_the_batches():
    from fastamp.fastreid.utils.precision_bn import get_bn_modules, update_bn_stats

    model = nn.Sequential(nn.BatchNorm1d(2))
    batches = [torch.randn(8, 2) + 3 for _ in range(4)]
    update_bn_stats(model, batches, 4)
    assert torch.allclose(model[0].running_mean, torch.cat(batches).mean(0), atol=1e-5)
    assert get_bn_modules(model) == [model[0]] and get_bn_modules(model.eval()) == []


def test_inference_context_restores_the_mode():
    from fastamp.fastreid.evaluation import inference_context

    model = nn.BatchNorm1d(2)
    with inference_context(model):
        assert not model.training
    assert model.training


def test_distances():
    from fastamp.fastreid.utils.compute_dist import (
        compute_cosine_distance,
        compute_euclidean_distance,
        compute_jaccard_distance,
    )

    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(30, 4)
    assert np.allclose(compute_euclidean_distance(x, y), torch.cdist(x, y).square(), atol=1e-4)
    unit = [nn.functional.normalize(each) for each in (x, y)]
    assert np.allclose(compute_cosine_distance(x, y), 1 - unit[0] @ unit[1].T, atol=1e-5)
    jaccard = compute_jaccard_distance(y, k1=10, k2=3, search_option=3)
    assert jaccard.shape == (30, 30) and jaccard.diagonal().max() < 0.01 < jaccard.max() <= 1


def test_re_ranking_of_distance_matrices_is_an_error():
    from fastamp.fastreid.evaluation.rerank import re_ranking

    with pytest.raises(ConfigError, match=r"TEST\.RERANK"):
        re_ranking(np.zeros((2, 3)), np.zeros((2, 2)), np.zeros((3, 3)))


def test_one_of_several_ranks_can_compute_rankings_and_distances(monkeypatch):
    from fastamp.fastreid.evaluation import aqe, evaluate_rank
    from fastamp.fastreid.utils.compute_dist import build_dist, compute_jaccard_distance

    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(30, 4)
    pids, cams = np.arange(30) % 6, np.ones(30, int)

    def compute():
        jaccard = build_dist(x, y, "jaccard", k1=5, k2=2)
        cmc, *_ = evaluate_rank(jaccard, pids[:6], pids, 0 * cams[:6], cams)
        return [*aqe(x, y, 1, 3, 1.0), jaccard, compute_jaccard_distance(y, k1=5, k2=2), cmc]

    alone = compute()
    # A collective operation would fail: there is no process group.
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for found, expected in zip(compute(), alone, strict=True):
        assert np.allclose(found, expected)


def test_messages_are_logged_in_some_of_the_calls(caplog):
    from fastamp.fastreid.utils.logger import create_small_table, log_every_n, log_every_n_seconds, log_first_n

    caplog.set_level("INFO")
    for number in range(4):
        log_first_n(20, f"first {number}", n=2, name="fastreid.test")
        log_first_n(20, "message", key="message")
        log_every_n(20, f"every {number}", n=3)
        log_every_n_seconds(20, f"seconds {number}", n=1000)
    assert caplog.messages == ["first 0", "message", "every 0", "seconds 0", "first 1", "every 3"]
    assert "0.500" in create_small_table({"loss": 0.5})


def test_version_is_that_of_the_api():
    import fastamp.fastreid as fastreid

    assert fastreid.__version__ == "1.3"
