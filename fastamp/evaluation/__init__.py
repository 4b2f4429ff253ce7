"""Evaluation: features of a test set, their ranking, and the numbers that the field reports."""

from fastamp.evaluation.details import Details, RankList, Wanted
from fastamp.evaluation.evaluator import inference_on_dataset
from fastamp.evaluation.judge import Judgement, judge_features
from fastamp.evaluation.matches import Identities
from fastamp.evaluation.precise_bn import update_bn_statistics
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.rank import RankingResult, rank_distances, rank_features
from fastamp.evaluation.reid_evaluator import ReidEvaluator
from fastamp.evaluation.report import print_results

__all__ = [
    "Details",
    "Identities",
    "Judgement",
    "Protocol",
    "RankList",
    "RankingResult",
    "ReidEvaluator",
    "Wanted",
    "inference_on_dataset",
    "judge_features",
    "print_results",
    "rank_distances",
    "rank_features",
    "update_bn_statistics",
]
