"""Settings of a hyperparameter search."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from autotuner.space import Space
from autotuner.tune_hooks import EvalRounds
from fastamp.config import CfgNode
from fastamp.utils.errors import ConfigError

# Keys that may change when a run resumes from a checkpoint; all other keys must stay the same.
MUTABLE = (
    "SOLVER.BASE_LR",
    "SOLVER.*_LR_FACTOR",
    "SOLVER.WEIGHT_DECAY*",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE",
    "MODEL.LOSSES.*.MARGIN",
    "MODEL.LOSSES.*.SCALE",
    "MODEL.LOSSES.*.EPSILON",
    "INPUT.*.PROB",
)


def is_mutable(key: str) -> bool:
    """Return True if the key can change during training."""
    return any(fnmatchcase(key, pattern) for pattern in MUTABLE)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search.

    Attributes:
        title: name of the search in messages and results.
        folder: folder of the search. If the folder already contains a search, ``run_search`` can only resume it.
        cfg: base config of the trials.
        space: search space.
        algorithm: a choice of ``--srch-algo``, or ``"grid"`` (each combination of choices once). Default
            ``"hyperopt"``.
        scheduler: a choice of ``--scheduler``. ``"pbt"`` (population based training, Jaderberg et al. 2017,
            arXiv:1711.09846) does not stop trials with low scores; they continue from checkpoints of better trials with
            perturbed values. The initial values are sampled at random, and only keys in ``MUTABLE`` can be searched.
            Default ``"asha"``.
        trials: number of trials. Default 20.
        trials_flag: command-line flag that sets ``trials``, for messages. Default ``"--num-trials"``.
        with_recipe: use the values of the recipe in the first trial, so that the winner is at least as good as the
            recipe. Default True.
        seed: seed of the sampling and of the validation split. Default 0.
        fraction: fraction of the training identities to hold out for validation, in 0..1. With 0, trials are
            evaluated on ``DATASETS.TESTS``. Default 0.2.
        grace_epochs: number of epochs during which no trial is stopped. Default 0.
        cpus, gpus: resources per trial; a fractional GPU is shared. Default 1 and 0.
        max_concurrent: maximum number of concurrent trials; 0 for as many as fit. Default 0.
        max_failures: maximum number of restarts of a crashed trial. Default 0.
        plugin: Python file that registers custom components; "" for none.

    Raises:
        ConfigError: if the algorithm and the scheduler are incompatible, or the scheduler is ``"pbt"`` and the space
            contains keys that cannot change during training.
    """

    title: str
    folder: Path
    cfg: CfgNode
    space: Space
    algorithm: str = "hyperopt"
    scheduler: str = "asha"
    trials: int = 20
    trials_flag: str = "--num-trials"
    with_recipe: bool = True
    seed: int = 0
    fraction: float = 0.2
    grace_epochs: int = 0
    cpus: float = 1
    gpus: float = 0
    max_concurrent: int = 0
    max_failures: int = 0
    plugin: str = ""

    def __post_init__(self) -> None:
        if self.algorithm == "bohb" and self.scheduler != "hyperband":
            raise ConfigError(
                f"--srch-algo bohb requires --scheduler hyperband, got --scheduler {self.scheduler}.\n"
                "  fix: remove --scheduler, or choose another --srch-algo"
            )
        if self.scheduler != "pbt":
            return
        if self.algorithm != "random":
            raise ConfigError(
                f"--scheduler pbt samples values itself, so --srch-algo {self.algorithm} has no effect.\n"
                "  fix: remove --srch-algo"
            )
        fixed = [key for key in self.space.parameters if not is_mutable(key)]
        if fixed:
            raise ConfigError(
                f"--scheduler pbt changes values during training; {', '.join(fixed)} must stay constant.\n"
                f"  fix: search only {', '.join(MUTABLE)}, or choose another --scheduler"
            )

    @property
    def is_population(self) -> bool:
        """True if trials continue from checkpoints of other trials."""
        return self.scheduler == "pbt"

    @property
    def threads(self) -> int:
        """Number of threads of a trial, at least 1."""
        return max(1, int(self.cpus))

    @property
    def rounds(self) -> EvalRounds:
        """Evaluations that count for the scheduler."""
        epochs = self.cfg.SOLVER.MAX_EPOCH
        return EvalRounds(min(self.cfg.TEST.EVAL_PERIOD, epochs), epochs, self.grace_epochs)

    def first(self) -> list[dict[str, Any]]:
        """Return ``[sample]`` with the recipe's values; [] if ``with_recipe`` is False or a value is not a choice."""
        sample = self.space.sample_of(self.cfg) if self.with_recipe else None
        return [] if sample is None else [sample]

    def description(self) -> dict[str, Any]:
        """Return the settings that must not change on resume, keyed by flag or config key."""
        space = {
            parameter.key: {parameter.kind: list(parameter.values)} for parameter in self.space.parameters.values()
        }
        config = {key.path: value for key, value in self.cfg.keys_below() if key.path != "OUTPUT_DIR"}
        facts = {
            "--srch-algo": self.algorithm,
            "--scheduler": self.scheduler,
            self.trials_flag: self.trials,
            "--seed": self.seed,
            "TUNE.VAL_FRACTION": self.fraction,
            "--cpus-per-trial": self.cpus,
            "--gpus-per-trial": self.gpus,
            "--max-concurrent": self.max_concurrent,
            "--max-failures": self.max_failures,
            "--plugin": self.plugin,
            "--space": space,
        }
        return json.loads(json.dumps(facts | config, default=dict))
