"""Evaluation of re-identification features: CMC, mAP, mINP and verification metrics.

Data flow: ``evaluator`` collects the features, ``metrics`` computes distances in blocks, ``protocol`` defines which
gallery images are ranked for each query, ``identities`` applies this definition, and ``rank`` computes AP, INP and
CMC.
"""

from fastamp.evaluation import (  # noqa: F401  register their protocols
    animals,
    cloth_changing,
    cross_modality,
    mars,
    product_retrieval,
    single_shot,
)
from fastamp.evaluation.evaluator import EVALUATOR_REGISTRY, DatasetEvaluator, inference_on_dataset
from fastamp.evaluation.identities import Identities
from fastamp.evaluation.metrics import compute_metrics
from fastamp.evaluation.precise_bn import update_bn_statistics
from fastamp.evaluation.protocol import Protocol, check_evaluable
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, RankingRule, rank_distances
from fastamp.evaluation.reid_evaluation import ReidEvaluator
from fastamp.evaluation.report_section import CountMatrix, ImageExample, ReportSection, Table
from fastamp.evaluation.result import EvaluationResult
from fastamp.evaluation.results_table import print_results
from fastamp.evaluation.retrieval_examples import RankList, ReportOptions, RetrievalExamples

__all__ = [
    "EVALUATOR_REGISTRY",
    "PROTOCOL_REGISTRY",
    "CountMatrix",
    "DatasetEvaluator",
    "EvaluationResult",
    "Identities",
    "ImageExample",
    "Protocol",
    "RankList",
    "RankingResult",
    "RankingRule",
    "ReidEvaluator",
    "ReportOptions",
    "ReportSection",
    "RetrievalExamples",
    "Table",
    "check_evaluable",
    "compute_metrics",
    "inference_on_dataset",
    "print_results",
    "rank_distances",
    "update_bn_statistics",
]
