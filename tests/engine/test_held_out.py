"""Choice between the weights before and after a fine-tuning by held-out training identities."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from fastamp.data import build_reid_train_loader
from fastamp.data.training_images import training_items
from fastamp.engine import held_out
from fastamp.evaluation.rank import RankingResult

PIDS = np.repeat(np.arange(20), 2)


def ranking_of(ap):
    ap = torch.as_tensor(ap, dtype=torch.float64)
    return RankingResult(ap, ap, torch.zeros(len(ap), 1, dtype=torch.int64))


@pytest.mark.parametrize(("gain", "expected"), [(0.1, True), (0.0, False), (-0.1, False)])
def test_training_improves_if_held_out_identities_gain(gain, expected):
    start = np.random.default_rng(0).uniform(0.4, 0.6, len(PIDS))
    assert held_out.improves(ranking_of(start), ranking_of(start + gain), PIDS) is expected


def test_the_mean_over_all_held_out_images_decides():
    start = np.full(len(PIDS), 0.5)
    after = start.copy()
    after[:2] = 1  # one identity of 20
    assert held_out.improves(ranking_of(start), ranking_of(after), PIDS)
    after[2:6] = 0.2
    assert not held_out.improves(ranking_of(start), ranking_of(after), PIDS)


@pytest.fixture
def cfg(demo, run_folder, tmp_path):
    return tiny.tiny_config(
        tmp_path / "run", "MODEL.WEIGHTS", str(run_folder / "model_final.pth"), "SOLVER.MAX_EPOCH", "1"
    )


@pytest.mark.integration
@pytest.mark.parametrize("averaged", [False, True])
def test_each_training_image_is_ranked_by_models_that_did_not_see_its_identity(cfg, averaged, monkeypatch):
    cfg = cfg.with_values({"SOLVER.EMA.ENABLED": averaged})
    seen, trained = [], []
    build = held_out._trainer
    monkeypatch.setattr(held_out, "_trainer", lambda *args: trained.append(build(*args)) or trained[-1])
    monkeypatch.setattr(held_out, "improves", lambda *args: seen.append(args))
    assert held_out.keeps_initial_weights(cfg) is True
    [(*rankings, pids)] = seen
    whole = build_reid_train_loader(cfg).dataset
    assert len(pids) == len(whole) and len(np.unique(pids)) == whole.num_classes
    assert len(rankings) == 2 and all(len(ranking.ap) == len(whole) and ranking.num_valid for ranking in rankings)
    assert not torch.equal(rankings[0].ap, rankings[1].ap)
    paths = []
    for trainer in trained:
        [(test, _)] = trainer.test_loaders.values()
        paths.append([{item.path for item in loader.dataset.items} for loader in (trainer.data_loader, test)])
    assert paths[0] == paths[1][::-1] and not paths[0][0] & paths[0][1]
    assert paths[0][0] | paths[0][1] == {item.path for item in whole.items}


def test_halves_without_a_batch_keep_nothing_of_the_start(cfg):
    images = len(build_reid_train_loader(cfg).dataset)
    cfg = cfg.with_values({"SOLVER.IMS_PER_BATCH": images})
    assert held_out.keeps_initial_weights(cfg) is False
    log = (Path(cfg.OUTPUT_DIR) / held_out.FOLDER / "0/log.txt").read_text()
    assert "WARNING" in log and "fix:" in log and "SOLVER.IMS_PER_BATCH" in log


def test_identities_seen_by_one_camera_each_keep_nothing_of_the_start(cfg, monkeypatch):
    def one_camera_each(datasets):
        items = training_items(datasets)
        numbers = {pid: number for number, pid in enumerate(sorted({item.pid for item in items}))}
        return [item._replace(camid=f"camera{numbers[item.pid] % 2}") for item in items]

    monkeypatch.setattr(held_out, "training_items", one_camera_each)
    monkeypatch.setattr(held_out, "DefaultTrainer", None)  # no training
    assert held_out.keeps_initial_weights(cfg) is False
