"""projects/DomainGeneralization: graph sampler and matcher against the reference program, training, resume, recipes."""

import random
import subprocess
import sys
from pathlib import Path

import graph_ranks
import numpy as np
import pytest
import tiny
import torch

from fastamp.config import read_config
from fastamp.config.projects import import_project
from fastamp.data.samplers import EpochBatchSampler
from fastamp.inference import Predictor
from fastamp.layers.distance import FeatureDistances
from fastamp.modeling import build_model
from fastamp.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
REFERENCE = Path(__file__).parents[1] / "reference/methods/qaconv1.npz"
RECIPES = sorted(path.stem for path in (ROOT / "projects/DomainGeneralization/configs").glob("*.yml"))


@pytest.fixture(autouse=True, scope="module")
def domaingeneralization(unregistered):
    import_project("DomainGeneralization")


@pytest.fixture(scope="module")
def data():
    return np.load(REFERENCE)


@pytest.fixture
def matcher(data):
    from domaingeneralization.matcher import QAConv

    found = QAConv(12)
    found.load_state_dict(
        {name.removeprefix("state_"): torch.from_numpy(data[name]) for name in data if name.startswith("state_")
         and "after" not in name}
    )  # fmt: skip
    return found


def test_batches_of_two_epochs_equal_the_reference(data):
    from domaingeneralization.graph_sampler import ImageTurns, graph_batches, nearest_identities

    random.seed(2)
    np.random.seed(2)
    pids = data["gs_pids"]
    images = [np.flatnonzero(pids == pid).tolist() for pid in data["gs_class_order"]]
    turns = ImageTurns(images, random.shuffle)
    for epoch in (1, 2):
        for rows in images:
            np.random.choice(rows, size=1)  # the images of the graph
        batches = graph_batches(nearest_identities(data["gs_class_distance"], 3), turns, 4)
        np.random.shuffle(batches)
        assert batches.flatten().tolist() == data[f"gs_order_epoch{epoch}"].tolist()


def test_scores_equal_the_reference_and_a_naive_loop(data, matcher):
    maps = torch.from_numpy(data["maps"])
    found = matcher.eval()(maps, maps)
    np.testing.assert_allclose(found.detach(), data["score_eval"], atol=1e-5)
    torch.testing.assert_close(matcher.train().all_scores(maps), found)
    assert matcher.training
    pairs = matcher.eval().pairs(maps[:3], maps[torch.tensor([[1, 5], [0, 2], [11, 2]])])
    torch.testing.assert_close(pairs, torch.stack([found[0, [1, 5]], found[1, [0, 2]], found[2, [11, 2]]]))
    one, other = (maps[row].flatten(1) for row in (2, 7))
    total = 0.0
    for a, b in ((one, other), (other, one)):
        best = [max(float(a[:, r] @ b[:, s]) for r in range(12)) for s in range(12)]
        bn = matcher.bn
        scaled = (torch.tensor(best) - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias
        total += float((matcher.fc.weight[0] @ scaled + matcher.fc.bias).detach())
    bn = matcher.logit_bn
    expected = (total - bn.running_mean) / (bn.running_var + bn.eps).sqrt() * bn.weight + bn.bias
    torch.testing.assert_close(found[2, 7], expected[0])


def test_loss_gradient_and_statistics_equal_the_reference(data, matcher):
    from domaingeneralization.matcher import PairwiseMatchingLoss

    maps = torch.from_numpy(data["maps"]).requires_grad_()
    scores = matcher.train()(maps, maps)
    loss = PairwiseMatchingLoss()({"matching_scores": scores}, torch.from_numpy(data["labels"]))
    assert loss.item() == pytest.approx(data["pairwise_loss"].mean(), rel=1e-6)
    loss.backward()
    np.testing.assert_allclose(maps.grad, data["pairwise_grad"], atol=1e-6)
    for name, bn in (("bn", matcher.bn), ("logit_bn", matcher.logit_bn)):
        np.testing.assert_allclose(bn.running_mean, data[f"state_after_{name}.running_mean"], atol=1e-5)
        np.testing.assert_allclose(bn.running_var, data[f"state_after_{name}.running_var"], atol=1e-5)
    half = PairwiseMatchingLoss(scale=0.5)({"matching_scores": scores}, torch.from_numpy(data["labels"]))
    torch.testing.assert_close(half, loss / 2)


def sampler_of(labels, batch_size=6, num_instances=2):
    from domaingeneralization.graph_sampler import GraphSampler

    return GraphSampler(
        labels=labels, camids=[0] * len(labels), batch_size=batch_size, num_instances=num_instances, seed=4
    )


def test_epoch_has_a_batch_for_each_identity_and_depends_on_seed_and_graph_only():
    labels = np.repeat(np.arange(7), [1, 2, 3, 4, 5, 6, 7])
    sampler = sampler_of(labels)
    assert sampler.images_per_epoch == 7 * 6
    nearest = np.array([[(row + 1) % 7, (row + 2) % 7] for row in range(7)])
    for graph in (None, nearest):
        sampler.nearest = graph
        stream = iter(EpochBatchSampler(sampler, batch_size=6, iters_per_epoch=7))
        batches = np.array([[key[2] for key in next(stream)] for _ in range(14)])
        for epoch in (batches[:7], batches[7:]):
            identities = labels[epoch].reshape(7, 3, 2)
            assert (identities[:, :, 0] == identities[:, :, 1]).all()
            last = identities[:, 2, 0]
            assert sorted(last) == list(range(7))
            if graph is not None:
                assert (identities[:, :2, 0] == nearest[last]).all()
        assert (batches[:7] != batches[7:]).any()
        again = iter(EpochBatchSampler(sampler, batch_size=6, iters_per_epoch=7, start_iter=9))
        assert [key[2] for key in next(again)] == batches[9].tolist()
    chosen = sampler.choose_images(3)
    assert labels[chosen].tolist() == list(range(7)) and chosen == sampler.choose_images(3) != sampler.choose_images(4)


def test_images_are_repeated_only_after_all_others_of_the_identity():
    from domaingeneralization.graph_sampler import ImageTurns

    turns = ImageTurns([[0, 1, 2, 3, 4], [5, 6, 7]], np.random.default_rng(1).shuffle)
    for identity, images in enumerate(([0, 1, 2, 3, 4], [5, 6, 7])):
        taken = [image for _ in range(30) for image in turns.take(identity, 4)]
        size = len(images)
        passes = [taken[first : first + size] for first in range(0, len(taken) - size + 1, size)]
        assert all(sorted(drawn) == images for drawn in passes) and len(set(map(tuple, passes))) > 3


RUN = ("PROJECTS", "[DomainGeneralization]", "MODEL.META_ARCHITECTURE", "MatchingBaseline", "MODEL.HEADS.NAME",
       "QAConvHead", "MODEL.HEADS.MATCHING.SIZE", "[4, 2]", "MODEL.HEADS.MATCHING.CHANNELS", "8", "MODEL.LOSSES.NAME",
       "[CrossEntropyLoss, PairwiseMatchingLoss]", "SOLVER.TRAINER", "GraphTrainer", "DATALOADER.SAMPLER_TRAIN",
       "GraphSampler", "DATALOADER.NUM_INSTANCE", "2", "SOLVER.IMS_PER_BATCH", "8", "SOLVER.MAX_EPOCH", "2",
       "TEST.EVAL_PERIOD", "2", "TEST.REPORT", "False", "TEST.BASELINES", "False", "TEST.BOOTSTRAP", "0",
       "TEST.MATCHING.CANDIDATES", "5")  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("iteration", [16, 19])
def test_run_builds_a_graph_each_epoch_and_resumes_bit_for_bit(runs, iteration):
    """Iteration 16 is the first of an epoch (16 identities), 19 is in the middle."""
    whole, graphs = tiny.trainer_of(runs / "whole", *RUN), graph_ranks.Graphs()
    whole.register_hooks([graphs])
    metrics = whole.train()
    assert len(graphs.seen) == 32 and (graphs.seen[0] == graphs.seen[15]).all()
    assert (graphs.seen[0] != graphs.seen[16]).any()
    assert {"Rank-1", "mAP"} <= set(metrics) and {"Rank-1", "mAP"} <= set(metrics["features"])
    state = whole.model.state_dict()
    opts = ("SOLVER.CHECKPOINT_ITERS", str(iteration), "SOLVER.CHECKPOINT_KEEP", "9")
    part = tiny.trainer_of(runs / "part", *RUN, *opts)
    part.register_hooks([tiny.StopAt(iteration)])
    with pytest.raises(tiny.Stopped):
        part.train()
    again = tiny.trainer_of(runs / "part", *RUN, *opts)
    assert again.trainer.start_iter == iteration
    again.train()
    assert [name for name, value in again.model.state_dict().items() if not torch.equal(value, state[name])] == []
    assert Predictor(runs / "whole/model_final.pth", device="cpu").features(np.zeros((64, 32, 3), np.uint8)).shape


@pytest.mark.integration
def test_two_processes_share_the_graph_which_is_that_of_one(runs):
    found = {}
    for count in (1, 2):
        folder = runs / f"{count} processes"
        folder.mkdir()
        options = [*RUN, "DATALOADER.NUM_WORKERS", "0", "SOLVER.AMP.ENABLED", "False"]
        subprocess.run([sys.executable, graph_ranks.__file__, folder, str(count), *options], check=True, timeout=120)
        found[count] = [torch.load(folder / f"{rank}.pth") for rank in range(count)]
    first, second = found[2]
    assert len(first["graphs"]) == len(second["graphs"]) == 32
    assert all(torch.equal(*pair) for pair in zip(first["graphs"], second["graphs"], strict=True))
    assert not torch.equal(first["graphs"][0], first["graphs"][16])
    assert all(torch.equal(value, second["parameters"][name]) for name, value in first["parameters"].items())
    assert torch.equal(found[1][0]["graphs"][0], first["graphs"][0])


def test_graph_of_the_trainer_uses_the_matching_scores_without_augmentation(runs):
    trainer = tiny.trainer_of(runs / "run", *RUN).trainer
    chosen = trainer.sampler.choose_images(0)
    found = trainer.identity_distances(chosen)
    model = trainer.model.eval()
    dataset = trainer.data_loader.dataset
    images = torch.stack([dataset.read(row) for row in chosen])
    maps = model.features_and_maps({"images": images})[1]
    torch.testing.assert_close(found, -model.heads.matcher(maps, maps).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.integration
def test_graph_of_a_model_without_a_matcher(runs):
    opts = ("MODEL.META_ARCHITECTURE", "Baseline", "MODEL.HEADS.NAME", "EmbeddingHead", "MODEL.LOSSES.NAME",
            "[TripletLoss]", "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1")  # fmt: skip
    trainer = tiny.trainer_of(runs / "run", *RUN, *opts)
    trainer.train()
    assert trainer.trainer.sampler.nearest.shape == (16, 3)


def test_candidates_are_ranked_by_scores_and_others_behind_them(matcher, data):
    from domaingeneralization.evaluation import matched_distances

    maps, features = torch.from_numpy(data["maps"]), torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    blocks = FeatureDistances(features[:4], features[4:], metric="cosine")
    found = matched_distances(blocks, matcher.eval(), maps, candidates=3)
    distances, plain = torch.empty(4, 8), torch.empty(4, 8)
    found.rows(0, 4, distances)
    blocks.rows(0, 4, plain)
    scores = torch.from_numpy(data["score_eval"])[:4, 4:]
    for query in range(4):
        by_features = plain[query].argsort().tolist()
        expected = sorted(by_features[:3], key=lambda row: -scores[query, row]) + by_features[3:]
        assert distances[query].argsort().tolist() == expected
    assert (distances >= 0).all()


@pytest.mark.parametrize(
    "opts, message",
    [
        (("DATALOADER.SAMPLER_TRAIN", "NaiveIdentitySampler"), "GraphSampler"),
        (("DATALOADER.NUM_INSTANCE", "8"), "at least two identities"),
        (("MODEL.HEADS.NAME", "EmbeddingHead"), "QAConvHead"),
        (("MODEL.HEADS.MATCHING.SIZE", "[4]"), "MODEL.HEADS.MATCHING.SIZE"),
    ],
)
def test_unusable_settings(runs, opts, message):
    with pytest.raises(ConfigError, match=message):
        tiny.trainer_of(runs / "run", *RUN, *opts)


@pytest.mark.parametrize("opts", [("TEST.RERANK.ENABLED", "True"), ("TEST.FLIP.ENABLED", "True")])
def test_other_rankings_are_rejected(runs, opts):
    with pytest.raises(ConfigError, match="TEST.MATCHING.ENABLED False"):
        tiny.trainer_of(runs / "run", *RUN, *opts, "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1").train()


def test_loss_without_scores():
    from domaingeneralization.matcher import PairwiseMatchingLoss

    with pytest.raises(ConfigError, match="QAConvHead"):
        PairwiseMatchingLoss()({"features": torch.zeros(2, 3)}, torch.zeros(2))


@pytest.mark.integration
def test_other_training_set_on_resume(runs):
    trainer = tiny.trainer_of(runs / "run", *RUN, "SOLVER.MAX_EPOCH", "1", "TEST.EVAL_PERIOD", "1")
    trainer.train()
    state = trainer.trainer.state_dict()
    state["graph"]["nearest"] = state["graph"]["nearest"][1:]
    with pytest.raises(ValueError, match=r"\b15\b"):
        trainer.trainer.load_state_dict(state)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("Base")])
def test_recipes_build(recipe):
    cfg = read_config(f"DomainGeneralization/{recipe}", ["MODEL.DEVICE", "cpu", "MODEL.BACKBONE.PRETRAIN", "False",
                      "MODEL.HEADS.NUM_CLASSES", "4"])  # fmt: skip
    model = build_model(cfg)
    if "graph" in recipe or recipe == "demo":
        assert cfg.SOLVER.IMS_PER_BATCH == 64 and cfg.DATALOADER.NUM_INSTANCE == 4
        height, width = cfg.INPUT.SIZE_TRAIN
        maps = model.feature_maps({"images": torch.zeros(1, 3, height, width)})
        assert tuple(maps.shape[2:]) == tuple(cfg.MODEL.HEADS.MATCHING.SIZE)
    assert (model.backbone.mixstyle is not None) == ("mixstyle" in recipe or recipe == "several")
