"""Messages of fastamp/evaluation and fastamp/report: features, protocols, metrics and figures."""

import logging
import sys
from dataclasses import replace

import pytest
import torch
from look_alikes import identities_of, look_alikes
from messages import Recorder
from naive_ranking import random_set
from tiny import tiny_config
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.evaluation import Identities, Protocol, compute_metrics, identification
from fastamp.evaluation.baselines import color_histogram
from fastamp.evaluation.calibration import Calibration, read_calibration
from fastamp.evaluation.calibration_check import check_calibration
from fastamp.evaluation.clustering import Clustering, cluster_features
from fastamp.evaluation.metrics import rank_distances
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rerank import ReRanking
from fastamp.evaluation.roc import write_roc
from fastamp.evaluation.thresholds import calibrate
from fastamp.report import read_history
from fastamp.report.figures import new_figure
from fastamp.report.similarity_map import similarity_map

SITES = ["fastamp/evaluation", "fastamp/report"]


def invoke(record: Recorder, request: pytest.FixtureRequest) -> None:
    protocols(record)
    features(record)
    animals(record)
    models(record)
    figures(record)
    calibrations(record)
    clusters(record)


def protocols(record):
    """Evaluate with incompatible TEST keys, and with arguments out of range."""
    for opts in (
        ("TEST.PROTOCOL", "vehicleid", "TEST.RERANK", "True"),
        ("TEST.PROTOCOL", "vehicleid", "TEST.AQE", "True"),
        ("TEST.PROTOCOL", "vehicleid", "TEST.ROC", "True"),
        ("TEST.PROTOCOL", "vehicleid", "TEST.AP", "trapezoid"),
        ("TEST.PROTOCOL", "market"),
        ("TEST.PROTOCOL", "sysu_all_single", "TEST.RERANK", "True"),
        ("TEST.PROTOCOL", "recall_at_k", "TEST.RERANK", "True"),
        ("TEST.RERANK", "True", "TEST.RERANK.K1", "0"),
        ("TEST.AQE", "True", "TEST.AQE.QE_K", "0"),
        ("TEST.PROTOCOL", "animals_open", "TEST.ANIMALS.THRESHOLD", "high"),
    ):
        with record(" ".join(opts)):
            cfg = get_cfg()
            cfg.merge_from_list(opts)
            Protocol.from_config(cfg)
    for title, call in {
        "Protocol(metric='manhattan')": lambda: Protocol(metric="manhattan"),
        "Protocol(rule='market')": lambda: Protocol(rule="market"),
        "QueryExpansion(k=0)": lambda: QueryExpansion(k=0),
        "ReRanking(k1=0)": lambda: ReRanking(k1=0),
    }.items():
        with record(title):
            call()


def features(record):
    """Evaluate features that cannot be ranked."""
    queries, gallery, ids = random_set(3)
    nan, infinite, huge = queries.clone(), queries.clone(), queries.clone()
    nan[2], infinite[0, 0], huge[0] = float("nan"), float("inf"), 1e30
    short = Identities(ids.query_pids[:3], ids.gallery_pids, ids.query_camids, ids.gallery_camids)
    strange = Identities(ids.query_pids + 1000, ids.gallery_pids, ids.query_camids, ids.gallery_camids)
    empty = Identities(ids.query_pids[:0], ids.gallery_pids, ids.query_camids[:0], ids.gallery_camids)
    same = torch.ones_like(queries), torch.ones_like(gallery)
    part = queries.clone(), gallery.clone()
    part[0][:10], part[1][:40] = 0, 0
    for title, (query, others, identities), protocol in (
        ("NaN", (nan, gallery, ids), Protocol()),
        ("infinite values", (infinite, gallery, ids), Protocol()),
        ("values whose squares overflow", (huge, gallery, ids), Protocol(metric="euclidean")),
        ("another width", (queries[:, :8], gallery, ids), Protocol()),
        ("width 0", (queries[:, :0], gallery[:, :0], ids), Protocol()),
        ("fewer identities", (queries, gallery, short), Protocol()),
        ("no queries", (queries[:0], gallery, empty), Protocol()),
        ("no match in the gallery", (queries, gallery, strange), Protocol()),
        ("equal features", (*same, ids), Protocol()),
        ("partly equal features", (*part, ids), Protocol()),
        ("too few impostor pairs for TEST.ROC.FAR", (queries[:2], gallery[:9], Identities(
            ids.query_pids[:2], ids.gallery_pids[:9], ids.query_camids[:2], ids.gallery_camids[:9])),
         Protocol(false_accept_rates=(1e-4,))),
        ("one identity and TEST.ROC", (queries[:2], gallery[:9], Identities(
            torch.ones(2).long(), torch.ones(9).long(), torch.zeros(2).long(), torch.arange(9))),
         Protocol(false_accept_rates=(1e-4,))),
    ):  # fmt: skip
        with record(f"features: {title}"):
            compute_metrics(query, others, identities, protocol)
    with record("TEST.GROUP_BY with a column that the test set does not have"):
        compute_metrics(queries, gallery, ids, Protocol(group_by="species"))
    worn = torch.full((len(queries),), -1), torch.ones(len(gallery), dtype=torch.int64)
    sides = (ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids)
    for title, rule, columns in (
        ("other cameras than those of SYSU-MM01", "sysu_all_single", {}),
        ("clothes of no query", "cloth_changing", {"clothes": worn}),
        ("no column clothes", "same_clothes", {}),
    ):
        with record(f"features: {title}"):
            compute_metrics(queries, gallery, Identities(*sides, columns), Protocol(rule=rule))
    with record("features: recall at k with one image per identity"):
        compute_metrics(
            queries,
            gallery[:0],
            Identities(torch.arange(len(queries)), sides[1][:0], sides[2], sides[3][:0]),
            Protocol(rule="recall_at_k"),
        )
    with record("distances of another shape"):
        rank_distances(torch.zeros(2, 2), ids)
    with record("NaN among the distances"):
        rank_distances(torch.full((len(queries), len(gallery)), float("nan")), ids)
    result = compute_metrics(queries, gallery, ids, Protocol(false_accept_rates=(0.1,)))
    with record("TEST.ROC without matplotlib"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "matplotlib", None)
        patch.setitem(__import__("sys").modules, "matplotlib.figure", None)
        write_roc(result.roc, (0.1,), record.root / "roc")


def animals(record):
    """Evaluate animals without the columns and the validation images that a threshold requires."""
    queries, gallery, ids = random_set(3)
    held_out = torch.arange(len(queries)) < len(queries) // 2
    for title, validation in (
        ("no columns", None),
        ("no validation queries", torch.zeros(len(queries))),
        ("validation queries without a match", held_out),
        ("another column as validation", ids.query_camids + 1),
    ):
        columns = {}
        if validation is not None:
            species = tuple(map(torch.zeros_like, (ids.query_pids, ids.gallery_pids)))
            columns = {"species": species, "validation": (validation.long(), species[1])}
        pids = torch.where(held_out, ids.query_pids + 1000, ids.query_pids)
        with record(f"animals_open, {title}"):
            identities = Identities(pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids, columns)
            compute_metrics(queries, gallery, identities, Protocol(rule="animals_open")).metrics()
    for true, predicted in ((["a", 1], ["a", "a"]), (["a"], [])):
        with record(f"identification.accuracy({true}, {predicted})"):
            identification.accuracy(true, predicted)


def models(record):
    """Evaluate models and baselines, also with NaN weights, too small images or no images."""
    from fastamp.data import build_reid_test_loader
    from fastamp.engine import DefaultTrainer
    from fastamp.evaluation import ReidEvaluator, update_bn_statistics
    from fastamp.modeling import build_model

    cfg = tiny_config(record.root / "run", "MODEL.HEADS.NUM_CLASSES", "4")
    model = build_model(cfg)
    with torch.no_grad():
        model.backbone[4].weight.fill_(float("nan"))
    with record("an evaluation of a model with NaN"):
        DefaultTrainer.test(cfg, model)
    with record("an evaluation of images that are too small for the baselines"):
        floors = cfg.with_values({"TEST.FLOORS": True, "INPUT.SIZE_TEST": (4, 4)})
        DefaultTrainer.test(floors, build_model(floors))
    with record("an evaluator without images"):
        loader, num_query = build_reid_test_loader(cfg, "Demo")
        ReidEvaluator(cfg, num_query).evaluate()
    with record("precise batch norm"):
        update_bn_statistics(build_model(cfg), loader, 2, policy=PrecisionPolicy("cpu", torch.float32, "test"))
    with record("raw-pixel baseline of images with 2 channels"):
        color_histogram(torch.zeros(1, 2, 64, 32))
    with record("an evaluation"):
        DefaultTrainer.test(cfg, build_model(cfg))


def figures(record):
    """Draw figures and similarity maps of unsuitable files and models."""
    record.file("history/metrics.json/x")
    with record("read_history of a folder"):
        read_history(record.root / "history/metrics.json")
    with record("a figure without matplotlib"), pytest.MonkeyPatch.context() as patch:
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(__import__("sys").modules, name, None)
        new_figure(1, 1)

    class Flat(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, batch):
            return self.backbone(batch["images"]).flatten(1)

    class Unused(Flat):
        def forward(self, batch):
            return batch["images"].requires_grad_().flatten(1)

    class Detached(Flat):
        def forward(self, batch):
            self.backbone(batch["images"])
            return batch["images"].requires_grad_().flatten(1)

    batch = {"images": torch.rand(2, 3, 8, 4)}
    for title, model in {
        "without a backbone": nn.Flatten(),
        "of vectors": Flat(nn.Sequential(nn.Flatten(), nn.Linear(96, 4))),
        "whose backbone is not used": Unused(nn.Conv2d(3, 4, 3)),
        "whose backbone has no effect": Detached(nn.Conv2d(3, 4, 3)),
    }.items():
        with record(f"similarity_map of a model {title}"):
            similarity_map(model.eval(), {"images": batch["images"].clone()})
    logging.getLogger("fastamp").setLevel(logging.INFO)


def calibrations(record):
    """Calibrate with invalid rates, too few identities, and features without pairs."""
    features, identities = look_alikes(120, 4, seed=0)
    wanted = {"metric": "cosine", "far": 0.01, "frr": 0.1, "fpir": 0.1}
    nan = features.clone()
    nan[0] = float("nan")
    for title, options in {
        "far=0": {"far": 0},
        "fpir=1": {"fpir": 1},
        "fraction=2": {"fraction": 2},
        "method=beta": {"method": "beta"},
        "far=1e-4": {"far": 1e-4},
        "frr=0.01": {"frr": 0.01},
        "fpir=0.01": {"fpir": 0.01},
        "fraction=0.995": {"fraction": 0.995},
        "gallery_size=1000": {"gallery_size": 1000},
    }.items():
        with record(f"calibrate({title})"):
            calibrate(features, identities, **wanted | options)
    with record("calibrate with NaN"):
        calibrate(nan, identities, **wanted)
    with record("calibrate with one image per identity"):
        calibrate(features, identities_of(480, 1), **wanted)
    found = calibrate(features, identities, **wanted)
    with record("check_calibration with another metric"):
        check_calibration(features, identities, Protocol(metric="euclidean"), found, dataset="people")
    with record("check_calibration with one image per identity"):
        check_calibration(torch.cat((features, features)), identities_of(480, 1), Protocol(), found, dataset="people")
    with record("check_calibration with other identities"):
        fewer = identities.select(slice(4), slice(400))
        check_calibration(features[:404], fewer, Protocol(), replace(found, source="people"), dataset="people")
    state = found.state_dict()
    with record("read_calibration of a damaged checkpoint"):
        read_calibration({"calibration": state | {"gallery_size": 0}}, "model.pth")
    with record("Calibration.from_state with invalid values"):
        Calibration.from_state(state | {"far": 0.0, "gallery_size": 0})
    with record("Calibration.from_state with a missing value"):
        Calibration.from_state({name: state[name] for name in state if name != "far"})


def clusters(record):
    """Cluster with settings out of range, no features, and fewer images than k1."""
    for options in ({"eps": 1.0}, {"k1": 0}):
        with record(f"Clustering({options})"):
            Clustering(**options)
    with record("clustering of no features"):
        cluster_features(torch.empty(0, 4), Clustering())
    with pytest.MonkeyPatch.context() as patch, record("HDBSCAN without scikit-learn"):
        patch.setitem(sys.modules, "sklearn.cluster", None)
        Clustering(method="hdbscan")
    with record("clustering of fewer images than k1"):
        cluster_features(torch.eye(4), Clustering())
