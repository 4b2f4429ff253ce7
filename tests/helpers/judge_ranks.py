"""Evaluate random features in one process or several: judge_ranks.py OUTPUT.json PROCESSES KEY VALUE ..

Each process takes its share of the batches, as the test loader gives it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from judging import random_set

from fastamp.config import get_cfg
from fastamp.engine import launch
from fastamp.evaluation import ReidEvaluator
from fastamp.utils import comm


def main(path, opts):
    cfg = get_cfg()
    cfg.merge_from_list(opts)
    queries, gallery, ids = random_set(5, queries=700, gallery=900, width=32, pids=60)
    columns = {
        "targets": torch.cat((ids.query_pids, ids.gallery_pids)),
        "camids": torch.cat((ids.query_camids, ids.gallery_camids)),
        "indices": torch.arange(1600),
        "images": torch.zeros(1600, 3, 8, 8, dtype=torch.uint8),
    }
    features = torch.cat((queries, gallery))
    evaluator = ReidEvaluator(cfg, 700, str(Path(path).parent / "files"))
    for rows in torch.arange(1600)[comm.get_rank() :: comm.get_world_size()].split(64):
        evaluator.process({name: column[rows] for name, column in columns.items()}, features[rows])
    metrics = evaluator.evaluate()
    assert (metrics is None) == (comm.get_rank() > 0)
    if metrics is not None:
        if cfg.TEST.REPORT:
            details = evaluator.judgement.details
            metrics["cameras"] = np.nan_to_num(details.cameras.mean_ap).round(9).tolist()
            metrics["pairs"] = [details.roc.num_genuine, details.roc.num_impostor, float(details.roc.tar.sum())]
            metrics["lists"] = [[one.query, *one.gallery.tolist()] for one in details.lists["worst"]]
        Path(path).write_text(json.dumps(metrics))


if __name__ == "__main__":
    launch(main, int(sys.argv[2]), args=(sys.argv[1], sys.argv[3:]))
