"""projects/Unsupervised: SpCL and camera-aware proxies against references and loops, domain adaptation, recipes."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from cluster_runs import METHODS, RUN, trainer_of, write_table

from fastamp.config import read_config
from fastamp.data.build import build_dataset, find_training_problems
from fastamp.data.samplers import EpochBatchSampler
from fastamp.evaluation.clustering import Clustering, dbscan, jaccard_distances
from fastamp.utils.errors import ConfigError, TrainingError

REFERENCE = Path(__file__).parents[1] / "reference/methods"

pytestmark = pytest.mark.usefixtures("unsupervised")


@pytest.mark.parametrize("name", ["memory1", "memory2"])
@pytest.mark.parametrize("kind", ["spcl", "spcl_gap"])
def test_hybrid_memory_loss_equals_the_reference(name, kind):
    """The gradients of the reference are with respect to the normalized features."""
    from unsupervised.hybrid_memory import HybridMemoryLoss

    data = np.load(REFERENCE / f"unsup_{name}.npz")
    loss = HybridMemoryLoss()
    loss.set_memory(torch.from_numpy(data["memory0"]))
    loss.set_labels(data[f"{kind}_labels"])
    for number in range(3):
        features = F.normalize(torch.from_numpy(data["inputs"][number]), dim=1).requires_grad_()
        value = loss({"features": features}, torch.from_numpy(data["targets"][number]))
        value.backward()
        assert value.item() == pytest.approx(float(data[f"{kind}_losses"][number]), rel=1e-6)
        expected, unit = torch.from_numpy(data[f"{kind}_input_grads"][number]), features.detach()
        expected = expected - (expected * unit).sum(1, keepdim=True) * unit
        torch.testing.assert_close(features.grad, expected, atol=1e-6, rtol=0)
    np.testing.assert_allclose(loss.memory, data[f"{kind}_memory3"], atol=1e-6)


def test_hybrid_memory_loss_is_finite_at_a_small_temperature():
    from unsupervised.hybrid_memory import HybridMemoryLoss

    memory = F.normalize(torch.randn(6, 4), dim=1)
    loss = HybridMemoryLoss(temperature=0.001)
    loss.set_memory(memory)
    loss.set_labels(np.array([0, 0, 1, 2, 3, 3]))
    features = memory[:2].clone().requires_grad_()
    value = loss({"features": features}, torch.tensor([0, 1]))
    value.backward()
    assert value.isfinite() and features.grad.isfinite().all()


@pytest.mark.parametrize("name", ["c1", "c2"])
def test_reliable_labels_equal_the_reference(name):
    from unsupervised.reliability import distances_up_to, reliable_labels

    data = np.load(REFERENCE / f"unsup_{name}.npz")
    distances = jaccard_distances(torch.from_numpy(data["features"]), Clustering(eps=0.62))
    labels, tight, loose = (dbscan(distances_up_to(distances, eps)) for eps in (0.6, 0.58, 0.62))
    assert (labels == data["spcl_labels"]).all()
    assert (tight == data["spcl_labels_tight"]).all() and (loose == data["spcl_labels_loose"]).all()
    found, threshold = reliable_labels(labels, tight, loose)
    assert (found == data["spcl_final_labels"]).all()
    assert threshold == pytest.approx(float(data["spcl_indep_threshold"]), abs=1e-6)
    labels, tight, loose = (dbscan(distances_up_to(distances, eps)) for eps in (0.52, 0.48, 0.56))
    later, _ = reliable_labels(labels, tight, loose, threshold / 2)
    assert (later == data["spcl_epoch1_final_labels_eps0.52_gap0.04_halfthreshold"]).all()


def test_clusters_of_one_image_are_outliers():
    from unsupervised.reliability import without_own_labels

    assert without_own_labels(np.array([7, 2, 2, 9, 7, 3])).tolist() == [1, 0, 0, -1, 1, -1]


def proxies_of_images():
    """Return features, labels, cameras and the batch of a test of CameraProxyLoss."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 8, generator=generator)
    labels, cameras = np.arange(60) % 7, np.arange(60) // 7 % 3
    labels[::9] = -1
    rows = np.flatnonzero(labels >= 0)[::4]
    return features, labels, cameras, rows, torch.randn(len(rows), 8, generator=generator)


@pytest.mark.parametrize("negatives", [3, 50])
def test_camera_proxy_loss_equals_a_naive_loop(negatives):
    from unsupervised.camera_proxies import CameraProxyLoss

    features, labels, cameras, rows, batch = proxies_of_images()
    loss = CameraProxyLoss(temperature=0.07, momentum=0.2, weight=0.5, start_epoch=1, negatives=negatives)
    options = {"cameras": cameras, "labeled": np.zeros(60, dtype=bool)}
    targets, classes = loss.start_epoch(features, labels, epoch=1, **options)
    assert (targets == classes).all() and ((targets < 0) == (labels < 0)).all()

    unit = F.normalize(features, dim=1)
    pairs = sorted({(label, camera) for label, camera in zip(labels, cameras, strict=True) if label >= 0})
    memory = torch.stack([F.normalize(unit[(labels == a) & (cameras == b)].mean(0), dim=0) for a, b in pairs])
    torch.testing.assert_close(loss.memory, memory)
    intra, inter = dict.fromkeys(range(3), 0.0), dict.fromkeys(range(3), 0.0)
    for row, feature in zip(rows, F.normalize(batch, dim=1), strict=True):
        score = (memory @ feature / 0.07).exp().tolist()
        label, camera = labels[row], cameras[row]
        of_camera = sum(value for value, (_, other) in zip(score, pairs, strict=True) if other == camera)
        positives = [value for value, (other, _) in zip(score, pairs, strict=True) if other == label]
        others = sorted(value for value, (other, _) in zip(score, pairs, strict=True) if other != label)
        total = sum(positives) + sum(others[-negatives:])
        count = (cameras[rows] == camera).sum()
        intra[camera] -= np.log(score[pairs.index((label, camera))] / of_camera) / count
        inter[camera] -= np.mean([np.log(value / total) for value in positives]) / count
    expected = sum(intra.values()) + 0.5 * sum(inter.values())
    given = batch.clone().requires_grad_()
    value = loss.eval()({"features": given}, torch.from_numpy(targets[rows]))
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-5) and given.grad.isfinite().all()

    # Before the first epoch of the inter-camera loss.
    loss.start_epoch(features, labels, epoch=0, **options)
    value = loss({"features": batch}, torch.from_numpy(targets[rows])).item()
    assert value == pytest.approx(sum(intra.values()), rel=1e-5)


def test_hybrid_memory_has_identities_and_images():
    """Labeled images share the centroid of their identity; outliers are classes of their own."""
    from unsupervised.hybrid_memory import HybridMemoryLoss

    features, labeled = torch.randn(8, 4), np.arange(8) < 4
    loss = HybridMemoryLoss()
    options = {"cameras": np.zeros(8, dtype=np.int64), "labeled": labeled}
    targets, classes = loss.start_epoch(features, np.array([0, 1, 1, 0, 2, -1, 2, -1]), epoch=0, **options)
    assert targets.tolist() == [0, 1, 1, 0, 2, 3, 4, 5] and classes.tolist() == [0, 1, 1, 0, 2, 3, 2, 4]
    unit = F.normalize(features, dim=1)
    centroids = F.normalize(torch.stack((unit[[0, 3]].mean(0), unit[[1, 2]].mean(0))), dim=1)
    torch.testing.assert_close(loss.memory, torch.cat((centroids, unit[4:])))
    memory = loss.memory.clone()
    targets, classes = loss.start_epoch(-features, np.array([0, 1, 1, 0, -1, 2, -1, 2]), epoch=1, **options)
    assert torch.equal(loss.memory, memory) and classes.tolist() == [0, 1, 1, 0, 3, 2, 4, 2]
    # Both halves of a batch have the same weight: their mean losses are added.
    loss.eval()
    parts = [loss({"features": -features[half]}, torch.from_numpy(targets[half])) for half in (labeled, ~labeled)]
    torch.testing.assert_close(loss({"features": -features}, torch.from_numpy(targets)), sum(parts))


def test_labeled_images_are_at_even_positions():
    from unsupervised.sampler import ClusterSampler

    labels, labeled = np.array([0, 0, 1, 1, 2, 2, 2, 3, 3, -1]), np.arange(10) < 4
    sampler = ClusterSampler(
        camids=np.zeros(10), batch_size=8, num_instances=2, iters_per_epoch=5, seed=0, labeled=labeled
    )
    sampler.set_labels(labels)
    stream = iter(EpochBatchSampler(sampler, batch_size=8, iters_per_epoch=5))
    for _ in range(10):
        rows = np.array([key[2] for key in next(stream)])
        assert len(rows) == 8 and labeled[rows[::2]].all() and not labeled[rows[1::2]].any() and 9 not in rows
        assert (labels[rows[0::4]] == labels[rows[2::4]]).all() and (labels[rows[1::4]] == labels[rows[3::4]]).all()


def test_domain_batch_norm_equals_two_batch_norms():
    from unsupervised.domain_norm import DomainBatchNorm2d

    norm, labeled, unlabeled = DomainBatchNorm2d(3), torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    images = torch.randn(6, 3, 4, 2)
    images[::2] = images[::2] * 5 + 3
    output = norm(images)
    torch.testing.assert_close(output[::2], labeled(images[::2]))
    torch.testing.assert_close(output[1::2], unlabeled(images[1::2]))
    assert norm.state_dict().keys() == unlabeled.state_dict().keys()
    torch.testing.assert_close(norm.running_mean, unlabeled.running_mean)
    torch.testing.assert_close(norm.eval()(images), unlabeled.eval()(images))


@pytest.mark.integration
@pytest.mark.parametrize("method", METHODS)
def test_adaptation_to_an_unlabeled_dataset(runs, method):
    table = write_table(runs, "target.csv", identities=False)
    opts = (*METHODS[method], "DATASETS.NAMES", f"[Demo, '{table}']", "UNSUPERVISED.LABELED", "[Demo]",
            "MODEL.HEADS.NORM", "DomainBN", "SOLVER.MAX_EPOCH", "2", "TEST.EVAL_PERIOD", "2",
            "SOLVER.CHECKPOINT_ITERS", "2", "SOLVER.CHECKPOINT_KEEP", "9")  # fmt: skip
    trainer = trainer_of(runs / "run", *opts)
    trainer.train()
    found, dataset = trainer.trainer, trainer.trainer.data_loader.dataset
    labeled = found.pseudo_labels.labeled
    identities = np.unique(dataset.labels[labeled], return_inverse=True)[1]
    assert labeled.sum() * 2 == len(dataset) and (found.labels[labeled] == identities).all()
    assert found.labels[~labeled].max() > identities.max() and found.history[-1]["purity"] is None
    assert found.loss.labeled > 0 and (found.targets[labeled] < found.loss.labeled.item()).all()
    if method == "spcl":
        part = trainer_of(runs / "part", *opts)
        part.register_hooks([tiny.StopAt(6)])
        with pytest.raises(tiny.Stopped):
            part.train()
        again = trainer_of(runs / "part", *opts)
        again.train()
        assert torch.equal(again.trainer.loss.memory, found.loss.memory)


@pytest.mark.parametrize(
    "opts, message",
    [
        (("UNSUPERVISED.LABELED", "[Market1501]"), "Market1501.*DATASETS.NAMES"),
        (("UNSUPERVISED.LABELED", "[Demo]"), "DATASETS.NAMES"),
        (("MODEL.HEADS.NORM", "DomainBN"), "UNSUPERVISED.LABELED"),
        (("UNSUPERVISED.EPS", "0.01", "UNSUPERVISED.EPS_GAP", "0.02"), "UNSUPERVISED.EPS_GAP 0.02"),
        (("UNSUPERVISED.EPS", "0.99", "UNSUPERVISED.EPS_GAP", "0.02"), "UNSUPERVISED.EPS_GAP 0.02"),
        (("UNSUPERVISED.INTER_CAMERA.NEGATIVES", "0"), "UNSUPERVISED.INTER_CAMERA.NEGATIVES"),
        (("MODEL.LOSSES.NAME", "[TripletLoss]"), "ClusterContrastLoss"),
        (("DATALOADER.SAMPLER_TRAIN", "TrainingSampler"), "ClusterSampler"),
        (("UNSUPERVISED.EPS", "1.0"), "UNSUPERVISED.EPS"),
        (("UNSUPERVISED.METHOD", "hdbscan", "UNSUPERVISED.EPS_GAP", "0.02"), "UNSUPERVISED.EPS_GAP"),
        (("UNSUPERVISED.UPDATE", "median"), "UNSUPERVISED.UPDATE"),
        (("UNSUPERVISED.TEMPERATURE", "0"), "UNSUPERVISED.TEMPERATURE"),
    ],
)
def test_unusable_settings(runs, opts, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(runs / "run", *opts)


def test_labeled_dataset_is_checked_by_itself(runs):
    cfg = read_config("", tiny.tiny_options(runs / "run", *RUN, "UNSUPERVISED.LABELED", "[Other]"))
    assert find_training_problems(build_dataset("Demo", cfg), cfg) == []


def test_odd_batches_cannot_be_halved(runs):
    table = write_table(runs, "target.csv", identities=False)
    opts = ("DATASETS.NAMES", f"[Demo, '{table}']", "UNSUPERVISED.LABELED", "[Demo]", "SOLVER.IMS_PER_BATCH", "15")
    with pytest.raises(ConfigError, match="SOLVER.IMS_PER_BATCH 15"):
        trainer_of(runs / "run", *opts)


@pytest.mark.integration
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "opts, message",
    [
        (("UNSUPERVISED.EPS", "0.03", "UNSUPERVISED.MIN_SAMPLES", "9"), "UNSUPERVISED.EPS 0.03"),
        (("UNSUPERVISED.EPS", "0.97", "UNSUPERVISED.K1", "90"), "only one cluster found"),
    ],
)
def test_fewer_than_two_clusters_end_the_training(runs, method, opts, message):
    with pytest.raises(TrainingError, match=message):
        trainer_of(runs / "run", *METHODS[method], *opts).train()


@pytest.mark.integration
def test_no_reliable_cluster(runs):
    trainer = trainer_of(runs / "run", *METHODS["spcl"])
    trainer.trainer.pseudo_labels.set_threshold(-1.0)
    with pytest.raises(TrainingError, match="only 0 reliable .*\n.*reduce UNSUPERVISED.EPS_GAP"):
        trainer.train()


@pytest.mark.integration
def test_other_loss_on_resume(runs):
    trainer = trainer_of(runs / "run", *METHODS["cap"], "SOLVER.MAX_EPOCH", "1")
    trainer.train()
    state = trainer.trainer.state_dict()
    other = trainer_of(runs / "other", *METHODS["spcl"])
    with pytest.raises(ValueError, match="HybridMemoryLoss"):
        other.trainer.load_state_dict(state)


SETTINGS = {  # loss, eps, gap, K1, temperature, momentum, batch, K, pooling
    "spcl": ("HybridMemoryLoss", 0.6, 0.02, 30, 0.05, 0.2, 64, 4, "GlobalAvgPool"),
    "cap": ("CameraProxyLoss", 0.5, 0.0, 20, 0.07, 0.2, 32, 4, "GlobalAvgPool"),
}


@pytest.mark.parametrize(
    "recipe, iterations",
    [("spcl_Market1501", 400), ("spcl_MSMT17", 800), ("cap_Market1501", 400), ("cap_MSMT17", 1000)],
)
def test_recipes_load_with_the_published_settings(recipe, iterations):
    cfg = read_config(f"Unsupervised/{recipe}", [])
    keys, solver = cfg.UNSUPERVISED, cfg.SOLVER
    found = (
        *(cfg.MODEL.LOSSES.NAME[0], keys.EPS, keys.EPS_GAP, keys.K1, keys.TEMPERATURE, keys.MOMENTUM),
        *(solver.IMS_PER_BATCH, cfg.DATALOADER.NUM_INSTANCE, cfg.MODEL.HEADS.POOL_LAYER),
    )
    assert found == SETTINGS[recipe.split("_")[0]]
    assert [4, 6, iterations] == [keys.MIN_SAMPLES, keys.K2, keys.ITERS_PER_EPOCH]
    assert (solver.BASE_LR, solver.WEIGHT_DECAY, solver.MAX_EPOCH, tuple(solver.STEPS)) == (3.5e-4, 5e-4, 50, (20, 40))
    assert (10 if recipe.startswith("cap") else 0) == solver.WARMUP_EPOCHS
    assert (recipe.split("_")[1],) == cfg.DATASETS.TESTS
