"""Comparison of pretrained and fine-tuned weights on training identities that the fine-tuning did not see."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fastamp.config import CfgNode
from fastamp.data.build import build_dataset
from fastamp.data.datasets.base import ImageItem
from fastamp.data.split import query_and_gallery, register_part
from fastamp.data.training_images import training_items
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.engine.defaults import DefaultTrainer
from fastamp.engine.setup import default_setup
from fastamp.evaluation import ReidEvaluator, inference_on_dataset
from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.run_comparison import compare_rankings
from fastamp.utils import comm
from fastamp.utils.errors import DataError, UserError

logger = logging.getLogger(__name__)

FOLDER = "held_out"


def keeps_initial_weights(cfg: CfgNode) -> bool:
    """Decide by the results on held-out identities whether a fine-tuning keeps the initial weights.

    The training identities are divided into two random halves. The model is fine-tuned on each half and evaluated on
    the other one: each image is a query against all others. The initial weights are kept if ``improves`` finds no gain
    over both halves. The test set is not used. Must be called on every rank.

    Args:
        cfg: config of the fine-tuning, with MODEL.WEIGHTS. The trainings write to ``OUTPUT_DIR/held_out``.

    Returns:
        True to keep them. False, with a warning, if half of the identities cannot be trained on.

    Raises:
        UserError: if a training fails.
    """
    items = training_items([build_dataset(name, cfg) for name in cfg.DATASETS.NAMES])
    identities = np.random.default_rng(cfg.SEED).permutation(sorted({str(item.pid) for item in items})).tolist()
    halves = [set(identities[::2]), set(identities[1::2])]
    rankings: list[list[RankingResult | None]] = []
    pids: list[np.ndarray] = []
    for number, held_out in enumerate(halves):
        logger.info("held-out identities, half %d of 2: training on the others", number + 1)
        try:
            trainer = _trainer(cfg, items, held_out, number)
        except UserError as error:
            logger.warning(
                "the initial and the fine-tuned weights are not compared: half of the training identities cannot be "
                "trained on: %s\n  fix: add images of other identities, or compare the evaluations before and after "
                "the training on a validation set",
                str(error).splitlines()[0],
            )
            return False
        rankings.append([_rank(trainer)])
        trainer.train()
        with trainer.evaluated_weights():
            rankings[-1].append(_rank(trainer))
        [(loader, count)] = trainer.test_loaders.values()
        pids.append(loader.dataset.labels[:count] + number * len(identities))
        if comm.is_main_process():
            for path in trainer.checkpointer.save_dir.glob("*.pth"):
                path.unlink()  # a checkpoint is several times as large as the model
    kept = False
    if comm.is_main_process():
        start, trained = (_concatenate(pair) for pair in zip(*rankings, strict=True))  # of both halves
        kept = not improves(start, trained, np.concatenate(pids))
    return bool(comm.broadcast_scalar(float(kept)))


def improves(start: RankingResult, trained: RankingResult, pids: np.ndarray) -> bool:
    """Return True if the training increases mAP on held-out identities. The log has the 95 % confidence interval.

    Args:
        start, trained: results with the initial and with the trained weights, in the same order of queries.
        pids: (Q,) identity of each query.
    """
    gain = compare_rankings(start, trained, pids)[0]
    logger.info(
        "held-out identities: mAP %.2f with the initial weights, %.2f after the training: difference %.2f, 95 %% "
        "confidence interval %.2f to %.2f",
        *(gain.first, gain.second, gain.difference, gain.low, gain.high),
    )
    if gain.difference <= 0:
        logger.warning(
            "the training does not improve the results on held-out identities: the initial weights are kept as the "
            "result (SOLVER.SWA.INITIAL_WEIGHT 1)\n"
            "  fix: add images of other identities, or use the trained weights with --always"
        )
    return gain.difference > 0


def _trainer(cfg: CfgNode, items: Sequence[ImageItem], held_out: set[str], number: int) -> DefaultTrainer:
    """Build the trainer of the other identities, with the initial weights and the held-out ones as its test set."""
    title = "+".join(cfg.DATASETS.NAMES)
    query, gallery = query_and_gallery([item for item in items if str(item.pid) in held_out])
    if len({item.pid for item in query}) < 2:
        raise DataError(
            f"{title}: fewer than two held-out identities have images from several cameras.\n"
            "  fix: add images from other cameras, or use the trained weights with --always"
        )
    test = [*query, *gallery]
    train = register_part(f"training half {number} of {title}", train=[i for i in items if str(i.pid) not in held_out])
    tested = register_part(f"held-out half {number} of {title}", query=test, gallery=test)
    values = {
        "DATASETS.NAMES": (train,),
        "DATASETS.TESTS": (tested,),
        "DATASETS.COMBINEALL": False,
        "MODEL.HEADS.NUM_CLASSES": 0,
        "OUTPUT_DIR": str(Path(cfg.OUTPUT_DIR) / FOLDER / str(number)),
        "LOGGERS": (),
        "SOLVER.CHECKPOINT_PERIOD": cfg.SOLVER.MAX_EPOCH,
        "TEST.PROTOCOL": "market1501",
        "TEST.EVAL_START": False,
        "TEST.EVAL_PERIOD": cfg.SOLVER.MAX_EPOCH,
        "TEST.BASELINES": False,
        "TEST.REPORT": False,
    }
    part = cfg.with_values(values)
    default_setup(part)
    trainer = DefaultTrainer(part)
    trainer.resume_or_load(resume=False)
    return trainer


def keep_keys(cfg: CfgNode) -> dict[str, object]:
    """Return config keys with which the result of a training is the initial weights."""
    keys = {"ENABLED": True, "START_EPOCH": cfg.SOLVER.MAX_EPOCH - 1, "INITIAL_WEIGHT": 1.0}
    return {"SOLVER.EMA.ENABLED": False} | {f"SOLVER.SWA.{key}": value for key, value in keys.items()}


def _rank(trainer: DefaultTrainer) -> RankingResult | None:
    """Rank all held-out images for each of them; an image is junk for itself. None on ranks other than 0."""
    [(loader, count)] = trainer.test_loaders.values()
    evaluator = ReidEvaluator(trainer.cfg, count)
    policy = trainer.policy.for_evaluation(trainer.cfg.SOLVER.AMP.EVAL_DTYPE)
    flip_test = trainer.cfg.TEST.FLIP.ENABLED
    inference_on_dataset(trainer.model, loader, evaluator, flip_test, policy=policy, locate=describe_evaluation)
    return evaluator.ranking


def _concatenate(rankings: Sequence[RankingResult | None]) -> RankingResult:
    parts = [ranking for ranking in rankings if ranking is not None]
    return RankingResult(
        ap=torch.cat([part.ap for part in parts]),
        inp=torch.cat([part.inp for part in parts]),
        first_match=torch.cat([part.first_match for part in parts]),
    )
