"""Tests of the table of all queries."""

import csv

import torch

from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation.rank import MISS, RankingResult
from fastamp.report.queries import write_queries


def test_queries_without_a_match_have_no_rank(tmp_path):
    ap = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    ranking = RankingResult(ap, ap, torch.tensor([[0, 2], [-1, -1], [MISS, MISS]]))
    write_queries(
        tmp_path / "queries.csv", ranking, [ImageItem(f"{number}.jpg", number, 0) for number in range(3)], None
    )
    with (tmp_path / "queries.csv").open() as file:
        found = {row["path"]: (row["ap"], row["first_match"]) for row in csv.DictReader(file)}
    assert found == {"0.jpg": ("100.00", "2"), "1.jpg": ("", ""), "2.jpg": ("0.00", "")}
