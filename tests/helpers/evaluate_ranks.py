"""Evaluate random features in 1, 2 and 3 processes with several configs: evaluate_ranks.py FOLDER

The batches are divided among the processes as the test loader does. metrics.json and the files of ``TEST.PER_QUERY``
are written to FOLDER/<processes>/<config>/.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from forked import run_forked
from naive_ranking import random_set

from fastamp.config import get_cfg
from fastamp.evaluation import ReidEvaluator
from fastamp.utils import comm

CONFIGS = {
    "plain": ["TEST.BASELINES", "True", "TEST.PER_QUERY", "True", "TEST.REPORT", "True"],
    "all": ["TEST.METRIC", "euclidean", "TEST.RERANK", "on", "TEST.AQE", "on", "TEST.ROC", "on"],
    "cuhk03": ["TEST.PROTOCOL", "cuhk03", "TEST.RERANK", "on", "TEST.KNN_BACKEND", "faiss"],
    "vehicleid": ["TEST.PROTOCOL", "vehicleid"],
    "float64": ["TEST.METRIC", "euclidean"],
    "tracklets": ["TEST.TRACKLET.POOL", "avg"],
    "without indices": [],
}


def main(folder):
    for name, opts in CONFIGS.items():
        dtype = torch.float64 if name in ("float64", "tracklets") else None
        evaluate(Path(folder) / str(comm.get_world_size()) / name, opts, dtype)


def evaluate(folder, opts, dtype):
    cfg = get_cfg()
    cfg.merge_from_list([*opts, "TEST.MEMORY_BUDGET_MB", "1"])  # so that distances are computed in several blocks
    queries, gallery, ids = random_set(5, queries=700, gallery=900, width=32, pids=60)
    columns = {
        "targets": torch.cat((ids.query_pids, ids.gallery_pids)),
        "camids": torch.cat((ids.query_camids, ids.gallery_camids)),
        "indices": torch.arange(1600),
        "images": torch.zeros(1600, 3, 8, 8, dtype=torch.uint8),
    }
    if "TEST.TRACKLET.POOL" in opts:  # one tracklet per identity and camera, whose frames are on several ranks
        columns["tracklet"] = 10 * columns["targets"] + columns["camids"]
    features = torch.cat((queries, gallery)).to(dtype)
    evaluator = ReidEvaluator(cfg, 700, str(folder))
    parts = [torch.arange(1600)[rank :: comm.get_world_size()] for rank in range(comm.get_world_size())]
    if "without indices" in str(folder):  # the parts of loaders for custom datasets, in the order of the ranks
        del columns["indices"]
        parts = torch.arange(1600).tensor_split(comm.get_world_size())
    for rows in parts[comm.get_rank()].split(64):
        evaluator.process({name: column[rows] for name, column in columns.items()}, features[rows])
    metrics = evaluator.evaluate()
    assert (metrics is None) == (comm.get_rank() > 0)
    if metrics is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if cfg.TEST.REPORT:
            examples = evaluator.result.examples
            metrics["cameras"] = np.nan_to_num(examples.cameras.mean_ap).round(9).tolist()
            metrics["pairs"] = [examples.roc.num_genuine, examples.roc.num_impostor, float(examples.roc.tar.sum())]
            metrics["lists"] = [[one.query, *one.gallery.tolist()] for one in examples.lists["worst"]]
        (folder / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    for processes in (1, 2, 3):
        run_forked(main, processes, Path(sys.argv[1]), sys.argv[1])
