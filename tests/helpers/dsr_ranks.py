"""Evaluate random places by deep spatial reconstruction in 1 and 2 processes: dsr_ranks.py FOLDER

The batches are divided among the processes as the test loader does. Metrics and distances are written to
FOLDER/<processes>.pth.
"""

import sys
from pathlib import Path

import torch
from forked import run_forked
from naive_ranking import random_set

from fastamp.config import get_cfg
from fastamp.config.projects import import_project
from fastamp.utils import comm

QUERIES, GALLERY = 23, 140


def main(folder):
    import_project("PartialReID")
    from partialreid.dsr_evaluation import DsrEvaluator

    values = {"PROJECTS": ["PartialReID"], "TEST.DSR.CANDIDATES": 31, "TEST.MEMORY_BUDGET_MB": 1.0}
    queries, gallery, ids = random_set(5, queries=QUERIES, gallery=GALLERY, width=12, pids=9)
    features, images = torch.cat((queries, gallery)), QUERIES + GALLERY
    draw = torch.Generator().manual_seed(0)
    # Places of an identity are similar.
    centers = torch.randn(20, 12, 7, generator=draw)
    pids = torch.cat((ids.query_pids, ids.gallery_pids))
    places = centers[pids] + torch.randn(images, 12, 7, generator=draw)
    scores = torch.nn.functional.normalize(torch.rand(images, 7, generator=draw), p=1, dim=1)
    columns = {
        "targets": pids,
        "camids": torch.cat((ids.query_camids, ids.gallery_camids)),
        "indices": torch.arange(images),
        "images": torch.zeros(images, 3, 8, 8, dtype=torch.uint8),
    }
    evaluator = DsrEvaluator(get_cfg().with_values(values), QUERIES)
    for rows in torch.arange(images)[comm.get_rank() :: comm.get_world_size()].split(16):
        batch = {name: column[rows] for name, column in columns.items()}
        evaluator.process(batch, (features[rows], places[rows], scores[rows]))
    mixed = []
    compute = evaluator.distances
    evaluator.distances = lambda *args: mixed.append(compute(*args)) or mixed[-1]
    metrics = evaluator.evaluate()
    assert (metrics is None) == (comm.get_rank() > 0)
    if metrics is not None:
        found = torch.empty(mixed[0].shape)
        mixed[0].rows(0, QUERIES, found)
        result = {"metrics": metrics, "rates": evaluator.rates, "distances": found}
        torch.save(result, Path(folder) / f"{comm.get_world_size()}.pth")


if __name__ == "__main__":
    for processes in (1, 2):
        run_forked(main, processes, Path(sys.argv[1]), sys.argv[1])
