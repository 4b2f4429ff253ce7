"""Tests of evaluators: module modes, flip test, precision, image order, output files and distributed runs."""

import json
from contextlib import nullcontext

import evaluate_ranks
import numpy as np
import preloaded
import pytest
import torch
from naive_ranking import random_set
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg, read_config
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.evaluation import DatasetEvaluator, Protocol, ReidEvaluator, compute_metrics, inference_on_dataset
from fastamp.evaluation.reid_evaluation import ranking_device
from fastamp.utils.errors import ConfigError, DataError, TrainingError


class Model(nn.Module):
    """Model that is not invariant to mirroring and records the dtype of its matrix product."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 5, bias=False)
        self.bn = nn.BatchNorm1d(5)
        self.dtypes = set()

    def forward(self, batch):
        product = self.fc(batch["images"].float().flatten(1) / 255)
        self.dtypes.add(product.dtype)
        return self.bn(product)


class Keep(DatasetEvaluator):
    def reset(self):
        self.features = []

    def process(self, inputs, outputs):
        self.features.append(outputs)

    def evaluate(self):
        return {"features": torch.cat(self.features)}


def batches(n=6, size=4):
    images = torch.randint(256, (n, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(n)
    return [
        {"images": images[i : i + size], "targets": rows[i : i + size] % 3, "camids": rows[i : i + size] // 3,
         "indices": rows[i : i + size]}
        for i in range(0, n, size)
    ]  # fmt: skip


def test_flip_test_averages_features_without_modifying_the_batch():
    model, loader = Model(), batches()
    before = [batch["images"].clone() for batch in loader]
    plain = inference_on_dataset(model, loader, Keep())["features"]
    mirrored = [batch | {"images": batch["images"].flip(3)} for batch in loader]
    mirror = inference_on_dataset(model, mirrored, Keep())["features"]
    flipped = inference_on_dataset(model, loader, Keep(), flip_test=True)["features"]
    torch.testing.assert_close(flipped, (plain + mirror) / 2)
    assert not torch.allclose(plain, mirror)
    assert all(torch.equal(a, batch["images"]) for a, batch in zip(before, loader, strict=True))


def test_evaluation_restores_training_and_evaluation_modes_of_modules():
    model = Model().train()
    model.bn.eval()
    inference_on_dataset(model, batches(), Keep())
    assert model.training and model.fc.training and not model.bn.training


def test_evaluation_uses_precision_policy_and_returns_float32_features():
    model = Model()
    policy = PrecisionPolicy("cpu", torch.bfloat16, "test")
    features = inference_on_dataset(model, batches(), Keep(), policy=policy)["features"]
    assert model.dtypes == {torch.bfloat16} and features.dtype == torch.float32
    inference_on_dataset(model, batches(), Keep())
    assert model.dtypes == {torch.bfloat16, torch.float32}


def test_evaluator_metrics_are_independent_of_batch_order():
    cfg = get_cfg()
    loader = batches(size=1)
    evaluator = ReidEvaluator(cfg, num_query=3)
    model = Model()
    first = inference_on_dataset(model, loader, evaluator)
    assert inference_on_dataset(model, loader[::-1], evaluator) == first
    assert first["num_query"] == 3 and first["num_gallery"] == 3 and first["num_query_without_match"] == 0
    assert all(isinstance(first[key], float) for key in ("Rank-1", "Rank-5", "Rank-10", "mAP", "mINP", "metric"))
    assert first["metric"] == (first["mAP"] + first["Rank-1"]) / 2


def test_evaluator_keeps_arrival_order_of_batches_without_indices():
    loader, evaluator, model = batches(size=2), ReidEvaluator(get_cfg(), num_query=3), Model()
    plain = [{key: value for key, value in batch.items() if key != "indices"} for batch in loader]
    assert inference_on_dataset(model, plain, evaluator) == inference_on_dataset(model, loader, evaluator)


def test_evaluator_counts_queries_without_match_and_raises_without_any_match():
    loader = batches(size=6)
    loader[0]["targets"][0] = 9
    assert inference_on_dataset(Model(), loader, ReidEvaluator(get_cfg(), 3))["num_query_without_match"] == 1
    loader[0]["camids"][:] = 0
    with pytest.raises(DataError, match="3 queries"):
        inference_on_dataset(Model(), loader, ReidEvaluator(get_cfg(), 3))


def test_evaluator_raises_if_no_images_were_processed():
    with pytest.raises(DataError):
        ReidEvaluator(get_cfg(), 3).evaluate()


class OnlyInTraining(nn.Module):
    """Layer that computes in float32 if gradients are enabled, and otherwise overflows in float16."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.fill_(6e4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False) if torch.is_grad_enabled() else nullcontext():
            return self.linear(x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_evaluation_error_names_module_with_first_nonfinite_output(dtype):
    """The model is finite in training and overflows only in evaluation."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.last = OnlyInTraining(), nn.Linear(4, 4)

        def forward(self, batch):
            return self.last(self.part(batch["images"]) * 1e-6)

    model = Model()
    batch = {"images": torch.ones(3, 4), "img_paths": ["a.jpg", "b.jpg", "c.jpg"]}
    policy = PrecisionPolicy("cpu", dtype, "test")
    with policy.autocast():
        assert torch.isfinite(model(batch)).all()  # with gradients
        with torch.no_grad():
            finite = bool(torch.isfinite(model(batch)).all())

    class Ignoring(DatasetEvaluator):
        def process(self, inputs, outputs):
            pass

        def evaluate(self):
            return {"mAP": 1.0}

    good = {"images": torch.zeros(3, 4), "img_paths": ["0.jpg"] * 3}
    if finite:
        assert inference_on_dataset(model, [good, batch], Ignoring(), policy=policy) == {"mAP": 1.0}
        return
    with pytest.raises(TrainingError) as error:
        inference_on_dataset(model.train(), [good, batch], Ignoring(), policy=policy, locate=describe_evaluation)
    text = str(error.value)
    assert "batch 1" in text and "a.jpg" in text
    assert "forward overflow in part.linear (Linear)" in text and "SOLVER.AMP.EVAL_DTYPE" in text
    assert model.training
    with pytest.raises(TrainingError) as error:
        inference_on_dataset(model, [good, batch], Ignoring(), policy=policy)
    assert "part.linear" not in str(error.value)
    with pytest.raises(TrainingError, match="a hint"):
        inference_on_dataset(model, [good, batch], Ignoring(), policy=policy, locate=lambda *_: "a hint")


def evaluator_with(features, cfg, folder=None):
    queries, gallery, ids = features
    evaluator = ReidEvaluator(cfg, len(queries), folder)
    images = torch.cat((queries, gallery))
    columns = {
        "targets": torch.cat((ids.query_pids, ids.gallery_pids)),
        "camids": torch.cat((ids.query_camids, ids.gallery_camids)),
        "indices": torch.arange(len(images)),
    }
    for rows in torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split(16):
        evaluator.process({name: column[rows] for name, column in columns.items()}, images[rows])
    return evaluator


def test_evaluator_raises_if_output_folder_cannot_be_created(tmp_path):
    (tmp_path / "taken").write_text("")
    cfg = read_config("", ["TEST.PER_QUERY", "True"])
    with pytest.raises(ConfigError, match="taken"):
        evaluator_with(random_set(3), cfg, str(tmp_path / "taken")).evaluate()


def test_evaluator_reorders_shuffled_batches_and_writes_only_requested_files(tmp_path):
    features = random_set(3)
    cfg = read_config("", ["TEST.PER_QUERY", "True", "TEST.ROC", "on"])
    metrics = evaluator_with(features, cfg, str(tmp_path / "Some")).evaluate()
    result = compute_metrics(*features, Protocol.from_config(cfg))
    assert metrics == result.metrics()
    saved = np.load(tmp_path / "Some/per_query.npz")
    np.testing.assert_array_equal(saved["ap"], result.ranking.ap)
    assert saved["valid"].dtype == bool and saved["first_match"].shape == (30, 1)
    assert sorted(path.name for path in (tmp_path / "Some").iterdir()) == ["per_query.npz", "roc.npz", "roc.png"]
    plain = evaluator_with(features, get_cfg(), str(tmp_path / "Other"))
    plain.evaluate()
    assert not (tmp_path / "Other").exists()


def test_ranking_uses_the_cpu_if_device_memory_is_insufficient(monkeypatch):
    features = torch.zeros(1000, 2048)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    for free, expected in ((10 * 2**30, "cuda"), (2**30, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        assert ranking_device(features, Protocol(), device).type == expected
    assert ranking_device(features, Protocol(), torch.device("mps")).type == "cpu"


@pytest.fixture(scope="module")
def evaluated_folder(made_once):
    """Folder with the evaluation results of 1, 2 and 3 processes."""
    with made_once("evaluate_ranks") as (folder, missing):
        if missing:
            preloaded.run(evaluate_ranks.__file__, folder).check_returncode()
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("name", evaluate_ranks.CONFIGS)
def test_distributed_evaluation_metrics_equal_those_of_one_process(evaluated_folder, name):
    found = []
    for processes in (1, 2, 3):
        folder = evaluated_folder / str(processes) / name
        found.append(json.loads((folder / "metrics.json").read_text()))
        if "TEST.PER_QUERY" in evaluate_ranks.CONFIGS[name]:
            found[-1]["ap"] = np.load(folder / "per_query.npz")["ap"].tolist()
    assert found[0] == found[1] == found[2] and found[0]["mAP"] > 20


def test_model_with_several_outputs_needs_an_own_evaluator():
    evaluator = ReidEvaluator(get_cfg(), 2)
    with pytest.raises(TrainingError, match="tuple"):
        evaluator.process(batches()[0], (torch.zeros(4, 2), torch.zeros(4, 2)))
