"""projects/Unsupervised: memory and sampler against the reference program, recipes, training, resume and bad input."""

import json
import random
import subprocess
import sys
from pathlib import Path

import cluster_ranks
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from cluster_runs import METHODS, RUN, trainer_of, write_table

from fastamp.config import read_config
from fastamp.data.samplers import EpochBatchSampler
from fastamp.engine import HookBase
from fastamp.inference import Predictor
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
REFERENCE = Path(__file__).parents[1] / "reference/methods"
RECIPES = ("Market1501", "DukeMTMC", "MSMT17", "VeRi")

pytestmark = pytest.mark.usefixtures("unsupervised")


@pytest.mark.parametrize("name", ["memory1", "memory2"])
@pytest.mark.parametrize("update", ["mean", "hard"])
@pytest.mark.parametrize("momentum, temperature", [(0.1, 0.05), (0.2, 0.05), (0.9, 0.10)])
def test_loss_gradient_and_memory_equal_the_reference(name, update, momentum, temperature):
    from unsupervised.cluster_contrast import ClusterContrastLoss

    data = np.load(REFERENCE / f"unsup_{name}.npz")
    loss = ClusterContrastLoss(temperature=temperature, momentum=momentum, update=update)
    loss.set_memory(torch.from_numpy(data["memory0"]))
    prefix = f"{update}_m{momentum:g}_t{temperature:.2f}"
    for number in range(3):
        features = torch.from_numpy(data["inputs"][number]).requires_grad_(True)
        value = loss({"features": features}, torch.from_numpy(data["targets"][number]))
        value.backward()
        assert value.item() == pytest.approx(float(data[f"{prefix}_losses"][number]), rel=1e-6)
        np.testing.assert_allclose(features.grad, data[f"{prefix}_input_grads"][number], atol=1e-6)
    np.testing.assert_allclose(loss.memory, data[f"{prefix}_memory3"], atol=1e-6)


def test_memory_is_updated_one_image_after_the_other():
    from unsupervised.cluster_contrast import update_hard
    from unsupervised.memory import update_mean

    memory, features = F.normalize(torch.randn(4, 6), dim=1), F.normalize(torch.randn(20, 6), dim=1)
    targets = torch.randint(3, (20,))
    expected = memory.clone()
    for feature, target in zip(features, targets, strict=True):
        expected[target] = F.normalize(0.3 * expected[target] + 0.7 * feature, dim=0)
    found = update_mean(memory, features, targets, 0.3)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[3], memory[3])  # a cluster without an image in the batch
    expected = memory.clone()
    for target in range(3):
        rows = features[targets == target]
        least = rows[(rows @ memory[target]).argmin()]
        expected[target] = F.normalize(0.3 * memory[target] + 0.7 * least, dim=0)
    torch.testing.assert_close(update_hard(memory, features, targets, 0.3), expected)


def test_memory_moves_only_in_training_with_gradients():
    from unsupervised.cluster_contrast import ClusterContrastLoss

    loss, features, targets = ClusterContrastLoss(), torch.randn(4, 8), torch.tensor([0, 1, 1, 2])
    with pytest.raises(ConfigError, match="ClusterTrainer"):
        loss({"features": features}, targets)
    memory = F.normalize(torch.randn(3, 8), dim=1)
    loss.set_memory(memory)
    with torch.no_grad():
        loss({"features": features}, targets)
    loss.eval()({"features": features}, targets)
    assert torch.equal(loss.memory, memory)
    loss.train()({"features": features}, targets)
    assert not torch.equal(loss.memory, memory) and loss.memory.data_ptr() != memory.data_ptr()
    assert "memory" not in loss.state_dict()


def test_centroids_exclude_outliers():
    from unsupervised.memory import compute_centroids

    features, labels = torch.randn(9, 5), np.array([0, 1, -1, 1, 0, 0, -1, 2, 2])
    unit = F.normalize(features, dim=1)
    expected = [F.normalize(unit[labels == number].mean(0), dim=0) for number in range(3)]
    torch.testing.assert_close(compute_centroids(features, labels), torch.stack(expected))


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("kind", ["multi_gallery", "multi_gallery_nocam"])
def test_images_of_a_pass_equal_the_reference(size, kind):
    from unsupervised.sampler import draw_images

    data = np.load(REFERENCE / "unsup_sampler.npz")
    images: dict[int, list[int]] = {}
    for row, pid in enumerate(data["pids"].tolist()):
        if pid >= 0:
            images.setdefault(pid, []).append(row)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    found, names = [], list(images)
    for number in torch.randperm(len(names)).tolist():
        rows = images[names[number]]
        first = rows.index(random.choice(rows))
        cameras = None if "nocam" in kind else data["cams"][rows].tolist()
        found += draw_images(rows, cameras, first, size, np.random)
    assert found == data[f"{kind}_K{size}_order"].tolist()


def sampler_of(labels, cameras, *, batch_size=8, num_instances=4, **options):
    from unsupervised.sampler import ClusterSampler

    sampler = ClusterSampler(
        camids=cameras, batch_size=batch_size, num_instances=num_instances, iters_per_epoch=5, seed=3, **options
    )
    sampler.set_labels(np.array(labels))
    return sampler


def batches(sampler, count=10):
    stream = iter(EpochBatchSampler(sampler, batch_size=sampler.batch_size, iters_per_epoch=5))
    return [[key[2] for key in next(stream)] for _ in range(count)]


def test_batches_have_k_images_of_p_clusters_and_no_outlier():
    labels, cameras = np.repeat([0, 1, 2, -1], 6), np.tile([0, 1, 2], 8)
    sampler = sampler_of(labels, cameras)
    for batch in batches(sampler):
        assert len(batch) == 8 and (labels[batch] >= 0).all()
        assert (np.diff(labels[batch].reshape(2, 4), axis=1) == 0).all() and len(set(labels[batch])) == 2
        for row in np.array(batch).reshape(2, 4):
            assert (cameras[row[1:]] != cameras[row[0]]).all()
    assert batches(sampler) == batches(sampler) and batches(sampler)[:5] != batches(sampler)[5:]


@pytest.mark.parametrize("labels", [[0] + [-1] * 11, [0] * 6 + [1] * 6, list(range(12)), [0] * 12])
@pytest.mark.parametrize("cameras", [[0] * 12, list(range(12))])
def test_batches_are_full_with_few_or_small_clusters(labels, cameras):
    for batch in batches(sampler_of(labels, cameras, batch_size=16)):
        assert len(batch) == 16 and all(labels[row] >= 0 for row in batch)


@pytest.mark.integration
def test_two_processes_give_the_labels_and_the_memory_of_one(tmp_path, subtests):
    subprocess.run([sys.executable, cluster_ranks.__file__, tmp_path], check=True, timeout=120)
    one = cluster_ranks.labels_and_memories()
    first, second = (torch.load(tmp_path / f"{rank}.pth", weights_only=False) for rank in range(2))
    for name in ("labels", "columns", "distances"):
        assert (first[name] == second[name]).all() and (first[name] == one[name]).all(), name
    assert len(set(one["labels"].tolist())) > 2
    for name in ("loss_cluster", "loss_hybrid", "loss_proxy"):
        with subtests.test(name):
            whole, parts = one[name], (first[name], second[name])
            assert torch.equal(parts[0]["memory"], parts[1]["memory"]) and torch.equal(
                parts[0]["memory"], whole["memory"]
            )
            losses = np.mean([part["losses"] for part in parts], axis=0)
            np.testing.assert_allclose(losses, whole["losses"], rtol=1e-6)
            for number, gradient in enumerate(whole["gradients"]):
                torch.testing.assert_close(torch.cat([part["gradients"][number] for part in parts]) / 2, gradient)


def test_center_cameras():
    from unsupervised.pseudo_labels import center_cameras

    features, cameras = torch.randn(9, 4), np.array([5, 2, 2, 5, 5, 2, 7, 7, 5])
    found = center_cameras(features, cameras)
    for camera in (2, 5, 7):
        rows = torch.from_numpy(cameras == camera)
        torch.testing.assert_close(found[rows], features[rows] - features[rows].mean(0))


class Targets(HookBase):
    """Record the indices and targets of each batch."""

    def __init__(self):
        self.seen = []

    def before_forward(self, batch):
        self.seen.append((self.trainer.epoch, batch["indices"].clone(), batch["targets"].clone()))


@pytest.mark.integration
@pytest.mark.parametrize(
    "iteration, method", [(4, "cluster contrast"), (6, "cluster contrast"), (6, "spcl"), (6, "cap")]
)
def test_run_trains_on_clusters_and_resumes_bit_for_bit(runs, iteration, method):
    """Iteration 4 is the first of an epoch, 6 is in the middle."""
    method = METHODS[method]
    whole, targets, labels = trainer_of(runs / "whole", *method), Targets(), {}

    class Labels(HookBase):
        def before_step(self):
            labels[self.trainer.epoch] = self.trainer.targets.copy()

    whole.register_hooks([targets, Labels()])
    whole.train()
    for epoch, indices, found in targets.seen:
        assert (labels[epoch][indices] == found.numpy()).all() and (found >= 0).all()
    state = whole.model.state_dict()

    opts = (*method, "SOLVER.CHECKPOINT_ITERS", "2", "SOLVER.CHECKPOINT_KEEP", "9")
    part = trainer_of(runs / "part", *opts)
    part.register_hooks([tiny.StopAt(iteration)])
    with pytest.raises(tiny.Stopped):
        part.train()
    again = trainer_of(runs / "part", *opts)
    assert again.trainer.start_iter == iteration
    again.train()
    assert [name for name, value in again.model.state_dict().items() if not torch.equal(value, state[name])] == []
    memory = whole.trainer.loss.memory_state()
    assert all(torch.equal(memory[name], value) for name, value in again.trainer.loss.memory_state().items())
    assert again.trainer.pseudo_labels.threshold == whole.trainer.pseudo_labels.threshold
    assert again.trainer.history == whole.trainer.history and len(whole.trainer.history) == 3
    saved = torch.load(runs / "part/model_final.pth", weights_only=True)["trainer"]["clusters"]
    assert saved["labels"].tolist() == whole.trainer.labels.tolist() and saved["history"][0]["clusters"] > 1

    page = (runs / "whole/clusters.html").read_text(encoding="utf-8")
    assert "epoch 3" in page and "<img" in page
    metrics = [json.loads(line) for line in (runs / "whole/metrics.json").read_text().splitlines()]
    assert any("clusters" in metric and "purity" in metric and "nmi" in metric for metric in metrics)
    assert Predictor(runs / "whole/model_final.pth", device="cpu").features(np.zeros((64, 32, 3), np.uint8)).shape


@pytest.mark.integration
def test_report_and_tensorboard_show_the_clusters_of_hdbscan(runs):
    opts = ("UNSUPERVISED.METHOD", "hdbscan", "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1", "TEST.REPORT", "True")
    trainer = trainer_of(runs / "run", *opts)
    trainer.train()
    text = (runs / "run/report.html").read_text(encoding="utf-8")
    section = text[text.index("Clusters of the training images") :]
    assert f"{trainer.trainer.history[0]['clusters']} clusters" in section and "Split identity" in section
    assert "<img" in section[: section.index("Mixed precision")] and "Clusters and identities" in text
    events = b"".join(path.read_bytes() for path in (runs / "run").rglob("*tfevents*"))
    assert all(tag in events for tag in (b"clusters", b"outliers", b"purity", b"nmi", b"JFIF"))


@pytest.mark.integration
@pytest.mark.parametrize("method", METHODS)
def test_skipped_step_leaves_the_memory_unchanged(runs, method):
    memories = []

    class Spoil(HookBase):
        def before_step(self):
            memories.append(self.trainer.loss.memory.clone())

        def after_backward(self):
            if self.trainer.iter == 1:
                next(p for p in self.trainer.model.parameters() if p.grad is not None).grad.fill_(float("nan"))

    trainer = trainer_of(runs / "run", *METHODS[method], "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1")
    trainer.register_hooks([Spoil()])
    trainer.train()
    assert trainer.trainer.step.skipped_total == 1
    assert not torch.equal(memories[0], memories[1]) and torch.equal(memories[1], memories[2])
    assert not torch.equal(memories[2], memories[3])


@pytest.mark.integration
def test_accumulated_bfloat16_steps_update_the_memory(runs):
    opts = ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "bfloat16", "SOLVER.ACCUM_STEPS", "2")
    trainer = trainer_of(runs / "run", *opts, "UNSUPERVISED.UPDATE", "hard", "SOLVER.MAX_EPOCH", "1",
                         "SOLVER.AMP.PREFLIGHT", "fallback")  # fmt: skip
    trainer.train()
    memory = trainer.trainer.loss.memory
    assert memory.dtype == torch.float32 and torch.allclose(memory.norm(dim=1), torch.ones(len(memory)))


@pytest.mark.integration
def test_training_set_without_identities(runs):
    table = write_table(runs, "unlabeled.csv", identities=False)
    trainer = trainer_of(runs / "run", "DATASETS.NAMES", table, "SOLVER.MAX_EPOCH", "1")
    trainer.train()
    assert trainer.trainer.history[0]["purity"] is None and trainer.trainer.history[0]["clusters"] > 1


def test_first_epochs_cluster_raw_pixels_and_color_histograms(runs):
    from fastamp.evaluation.baselines import color_histogram, raw_pixels
    from fastamp.evaluation.clustering import cluster_features

    opts = ("UNSUPERVISED.BASELINE_EPOCHS", "1", "UNSUPERVISED.CENTER_CAMERAS", "True")
    trainer = trainer_of(runs / "run", *opts).trainer
    from unsupervised.pseudo_labels import center_cameras

    dataset = trainer.data_loader.dataset
    model, pixels, colors = trainer.features_of_training_set(baselines=True)
    images = torch.stack([dataset.read(row) for row in range(len(dataset))])
    torch.testing.assert_close(pixels, raw_pixels(images))
    torch.testing.assert_close(colors, color_histogram(images))
    trainer.move_to(0, 3)
    assert trainer.prepare_epoch()
    kinds = [F.normalize(center_cameras(colors, dataset.camids), dim=1) for colors in (pixels, colors)]
    assert (trainer.labels == cluster_features(torch.cat(kinds, dim=1), trainer.pseudo_labels.clustering)).all()
    trainer.move_to(4, 3)
    assert trainer.prepare_epoch()
    kind = F.normalize(center_cameras(model, dataset.camids), dim=1)
    assert (trainer.labels == cluster_features(kind, trainer.pseudo_labels.clustering)).all()


@pytest.mark.integration
def test_fewer_clusters_than_in_a_batch(runs, caplog):
    opts = ("SOLVER.IMS_PER_BATCH", "64", "DATALOADER.NUM_INSTANCE", "2", "SOLVER.MAX_EPOCH", "1")
    trainer_of(runs / "run", *opts, "UNSUPERVISED.K1", "12", "UNSUPERVISED.EPS", "0.7").train()
    assert "clusters are repeated in a batch" in caplog.text


@pytest.mark.integration
def test_other_training_set_on_resume(runs):
    trainer = trainer_of(runs / "run", "SOLVER.MAX_EPOCH", "1")
    trainer.train()
    state = trainer.trainer.state_dict()
    state["clusters"]["labels"] = state["clusters"]["labels"][1:]
    with pytest.raises(ValueError, match=r"\b95\b"):
        trainer.trainer.load_state_dict(state)


def test_head_has_no_classifier(tmp_path):
    model = build_model(read_config("", tiny.tiny_options(tmp_path, *RUN)))
    assert not any("heads.weight" in name for name in model.state_dict())
    with pytest.raises(ConfigError, match="MODEL.HEADS.NAME=ClusterHead"):
        model.class_logits({"images": torch.zeros(2, 3, 64, 32)})


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_load_with_the_published_settings(recipe):
    cfg = read_config(f"Unsupervised/{recipe}", [])
    keys, solver = cfg.UNSUPERVISED, cfg.SOLVER
    assert (keys.EPS, keys.MIN_SAMPLES, keys.K1, keys.K2) == (0.6, 4, 30, 6)
    assert (keys.TEMPERATURE, keys.MOMENTUM, keys.UPDATE, keys.CROSS_CAMERA) == (0.05, 0.1, "mean", True)
    assert (400 if recipe in ("MSMT17", "VeRi") else 200) == keys.ITERS_PER_EPOCH
    assert (
        solver.IMS_PER_BATCH,
        cfg.DATALOADER.NUM_INSTANCE,
        solver.MAX_EPOCH,
        tuple(solver.STEPS),
    ) == (256, 16, 50, (20, 40))
    assert (solver.BASE_LR, solver.WEIGHT_DECAY, solver.BIAS_LR_FACTOR, solver.WARMUP_ITERS) == (3.5e-4, 5e-4, 1, 0)
    assert tuple(cfg.INPUT.SIZE_TRAIN) == ((224, 224) if recipe == "VeRi" else (256, 128))
    assert cfg.DATASETS.NAMES == cfg.DATASETS.TESTS == (recipe,)
