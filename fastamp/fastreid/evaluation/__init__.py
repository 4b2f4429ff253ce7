"""FastReID's evaluation, computed by ``fastamp.evaluation``."""

from fastamp.fastreid.evaluation.clas_evaluator import ClasEvaluator
from fastamp.fastreid.evaluation.evaluator import DatasetEvaluator, inference_context, inference_on_dataset
from fastamp.fastreid.evaluation.query_expansion import aqe
from fastamp.fastreid.evaluation.rank import evaluate_rank
from fastamp.fastreid.evaluation.reid_evaluation import ReidEvaluator
from fastamp.fastreid.evaluation.testing import print_csv_format

__all__ = [
    "ClasEvaluator",
    "DatasetEvaluator",
    "ReidEvaluator",
    "aqe",
    "evaluate_rank",
    "inference_context",
    "inference_on_dataset",
    "print_csv_format",
]
