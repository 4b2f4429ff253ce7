"""Register the components of FastRetri, declare its config keys, and evaluate by Recall@k."""

from fastretri import datasets, retri_evaluator  # noqa: F401  register components

KEYS = retri_evaluator.KEYS


def add_config(cfg):
    """Select the evaluator of this project, as FastReID's trainer does; a recipe can name another one."""
    cfg.TEST.EVALUATOR = "RetriEvaluator"
