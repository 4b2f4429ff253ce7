"""Evaluation: features of a test set, their ranking, and the numbers that the field reports."""

from fastamp.evaluation.evaluator import inference_on_dataset
from fastamp.evaluation.precise_bn import update_bn_statistics
from fastamp.evaluation.rank import RankingResult, rank_distances, rank_features
from fastamp.evaluation.reid_evaluator import ReidEvaluator
from fastamp.evaluation.report import print_results

__all__ = [
    "RankingResult",
    "ReidEvaluator",
    "inference_on_dataset",
    "print_results",
    "rank_distances",
    "rank_features",
    "update_bn_statistics",
]
