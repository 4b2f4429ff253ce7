"""Names of FastReID's public API that fastamp itself does not use.

Code written for FastReID runs after the package name in its imports is changed from ``fastreid`` to ``fastamp``. Most
names belong to fastamp's own modules. The tables below list the others: ``MODULES`` maps modules of FastReID to the
modules of this package, and ``NAMES`` adds names to modules of fastamp. All of them are imported on first access.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

MODULES = {
    f"fastamp.data.datasets.{name}": "fastamp.data.datasets.catalog"
    for name in (
        "caviara",
        "cuhk_sysu",
        "dukemtmcreid",
        "grid",
        "iLIDS",
        "lpw",
        "pes3d",
        "pku",
        "prai",
        "prid",
        "saivt",
        "shinpuhkan",
        "sysu_mm",
        "thermalworld",
        "wildtracker",
    )
} | {
    "fastamp.data.common": "fastamp.compat.data",
    "fastamp.data.data_utils": "fastamp.compat.data",
    "fastamp.data.datasets.bases": "fastamp.compat.datasets",
    "fastamp.data.datasets.AirportALERT": "fastamp.data.datasets.airportalert",
    "fastamp.evaluation.clas_evaluator": "fastamp.compat.evaluation",
    "fastamp.evaluation.testing": "fastamp.compat.evaluation",
    "fastamp.layers.activation": "fastamp.compat.layers",
    "fastamp.layers.any_softmax": "fastamp.compat.any_softmax",
    "fastamp.layers.batch_norm": "fastamp.compat.layers",
    "fastamp.layers.drop": "fastamp.compat.layers",
    "fastamp.layers.helpers": "fastamp.compat.layers",
    "fastamp.layers.non_local": "fastamp.compat.layers",
    "fastamp.layers.se_layer": "fastamp.layers.attention",
    "fastamp.layers.weight_init": "fastamp.compat.layers",
    "fastamp.modeling.backbones.mobilenetv3": "fastamp.modeling.backbones.mobilenet",
    "fastamp.modeling.backbones.vision_transformer": "fastamp.modeling.backbones.vit",
    "fastamp.modeling.losses.circle_loss": "fastamp.modeling.losses.pairwise_cosine",
    "fastamp.modeling.losses.cross_entroy_loss": "fastamp.modeling.losses.cross_entropy",
    "fastamp.modeling.losses.focal_loss": "fastamp.modeling.losses.focal",
    "fastamp.modeling.losses.triplet_loss": "fastamp.modeling.losses.triplet",
    "fastamp.modeling.losses.utils": "fastamp.compat.modeling",
    "fastamp.utils.checkpoint": "fastamp.checkpoint.checkpointer",
    "fastamp.utils.collect_env": "fastamp.compat.tools",
    "fastamp.utils.compute_dist": "fastamp.compat.evaluation",
    "fastamp.utils.file_io": "fastamp.compat.files",
    "fastamp.utils.history_buffer": "fastamp.compat.events",
    "fastamp.utils.params": "fastamp.compat.solver",
    "fastamp.utils.precision_bn": "fastamp.compat.tools",
    "fastamp.utils.timer": "fastamp.compat.tools",
    "fastamp.utils.visualizer": "fastamp.compat.visualizer",
}
"""Module of FastReID -> module that provides its names."""

NAMES = {
    "fastamp.checkpoint.checkpointer": {
        "PathManager": "fastamp.compat.files.PathManager",
        "PeriodicCheckpointer": "fastamp.compat.checkpoint.PeriodicCheckpointer",
        "get_missing_parameters_message": "fastamp.compat.checkpoint.get_missing_parameters_message",
        "get_unexpected_parameters_message": "fastamp.compat.checkpoint.get_unexpected_parameters_message",
    },
    "fastamp.config": {"configurable": "fastamp.compat.config.configurable"},
    "fastamp.config.config": {"configurable": "fastamp.compat.config.configurable"},
    "fastamp.data": {"CommDataset": "fastamp.compat.data.CommDataset"},
    "fastamp.data.build": {
        "CommDataset": "fastamp.compat.data.CommDataset",
        "_root": "fastamp.compat.data._root",
        "fast_batch_collator": "fastamp.compat.data.fast_batch_collator",
    },
    "fastamp.data.transforms": {"ToTensor": "fastamp.compat.data.ToTensor"},
    "fastamp.engine": {"DefaultPredictor": "fastamp.compat.engine.DefaultPredictor"}
    | {name: f"fastamp.compat.hooks.{name}" for name in ("CallbackHook", "IterationTimer", "LayerFreeze", "PreciseBN")}
    | {
        name: f"fastamp.engine.hooks.{name}"
        for name in ("EvalHook", "LRScheduler", "PeriodicCheckpointer", "PeriodicWriter")
    },
    "fastamp.engine.defaults": {
        "DefaultPredictor": "fastamp.compat.engine.DefaultPredictor",
        "AMPTrainer": "fastamp.engine.train_loop.AMPTrainer",
        "SimpleTrainer": "fastamp.engine.train_loop.SimpleTrainer",
        "default_argument_parser": "fastamp.utils.arguments.default_argument_parser",
        "default_setup": "fastamp.engine.setup.default_setup",
    },
    "fastamp.engine.hooks": {
        "CallbackHook": "fastamp.compat.hooks.CallbackHook",
        "IterationTimer": "fastamp.compat.hooks.IterationTimer",
        "LayerFreeze": "fastamp.compat.hooks.LayerFreeze",
        "PreciseBN": "fastamp.compat.hooks.PreciseBN",
        "flatten_results_dict": "fastamp.compat.evaluation.flatten_results_dict",
        "get_bn_modules": "fastamp.compat.tools.get_bn_modules",
    },
    "fastamp.evaluation": {
        "ClasEvaluator": "fastamp.compat.evaluation.ClasEvaluator",
        "aqe": "fastamp.compat.evaluation.aqe",
        "inference_context": "fastamp.compat.evaluation.inference_context",
        "evaluate_rank": "fastamp.compat.evaluation.evaluate_rank",
        "print_csv_format": "fastamp.compat.evaluation.print_csv_format",
    },
    "fastamp.evaluation.evaluator": {
        "ReidEvaluator": "fastamp.evaluation.reid_evaluation.ReidEvaluator",
        "inference_context": "fastamp.compat.evaluation.inference_context",
    },
    "fastamp.evaluation.query_expansion": {"aqe": "fastamp.compat.evaluation.aqe"},
    "fastamp.evaluation.rank": {
        name: f"fastamp.compat.evaluation.{name}" for name in ("eval_cuhk03", "eval_market1501", "evaluate_rank")
    },
    "fastamp.evaluation.rerank": {"re_ranking": "fastamp.compat.evaluation.re_ranking"},
    "fastamp.layers": {"any_softmax": "fastamp.compat.any_softmax"}
    | {
        name: f"fastamp.layers.pooling.{name}"
        for name in (
            "AdaptiveAvgMaxPool",
            "ClipGlobalAvgPool",
            "Flatten",
            "GeneralizedMeanPooling",
            "GeneralizedMeanPoolingP",
            "GlobalAvgPool",
            "GlobalMaxPool",
            "Identity",
        )
    }
    | {
        name: f"fastamp.compat.layers.{name}"
        for name in (
            "DropPath",
            "FastGlobalAvgPool",
            "FrozenBatchNorm",
            "GELU",
            "MemoryEfficientSwish",
            "Mish",
            "Non_local",
            "Swish",
            "SyncBatchNorm",
            "drop_path",
            "get_norm",
            "make_divisible",
            "to_2tuple",
            "trunc_normal_",
            "weights_init_classifier",
            "weights_init_kaiming",
        )
    },
    "fastamp.layers.norm": {"get_norm": "fastamp.compat.layers.get_norm"},
    "fastamp.layers.pooling": {"FastGlobalAvgPool": "fastamp.compat.layers.FastGlobalAvgPool"},
    "fastamp.modeling.backbones": {
        f"build_{name}_backbone": f"fastamp.compat.modeling.build_{name}_backbone"
        for name in (
            "effnet",
            "mobilenetv2",
            "mobilenetv3",
            "osnet",
            "regnet",
            "repvgg",
            "resnest",
            "resnet",
            "shufflenetv2",
            "vit",
        )
    },
    "fastamp.modeling.heads": {"REID_HEADS_REGISTRY": "fastamp.modeling.heads.build.HEADS_REGISTRY"},
    "fastamp.modeling.heads.build": {"REID_HEADS_REGISTRY": "fastamp.modeling.heads.build.HEADS_REGISTRY"},
    "fastamp.modeling.losses.pairwise_cosine": {
        "pairwise_circleloss": "fastamp.modeling.losses.pairwise_cosine.pairwise_circle_loss"
    },
    "fastamp.modeling.losses": {"pairwise_circleloss": "fastamp.modeling.losses.pairwise_cosine.pairwise_circle_loss"},
    "fastamp.solver": {"build_lr_scheduler": "fastamp.compat.solver.build_lr_scheduler"},
    "fastamp.solver.build": {"build_lr_scheduler": "fastamp.compat.solver.build_lr_scheduler"},
    "fastamp.utils.comm": {
        name: f"fastamp.compat.comm.{name}"
        for name in ("gather", "get_local_rank", "get_local_size", "reduce_dict", "shared_random_seed")
    },
    "fastamp.utils.env": {"seed_all_rng": "fastamp.compat.tools.seed_all_rng"},
    "fastamp.utils.events": {
        name: f"fastamp.compat.events.{name}"
        for name in ("CommonMetricPrinter", "EventStorage", "EventWriter", "get_event_storage")
    },
    "fastamp.utils.logger": {"PathManager": "fastamp.compat.files.PathManager"},
}
"""Module of fastamp -> name in FastReID -> module and name of the object."""


class _ModuleAliases(MetaPathFinder, Loader):
    """Import hook that maps the names in ``MODULES`` to the module objects imported under fastamp's names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state  # the import system has replaced it by that of the alias


class _AddedNames(MetaPathFinder):
    """Import hook that adds ``NAMES`` to modules of fastamp."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in NAMES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module, NAMES[fullname])
            vars(spec.loader).update(exec_module=execute)
        return spec


def _execute(run: Callable[[ModuleType], None], names: dict[str, str], module: ModuleType) -> None:
    """Execute a module, then add ``names`` to its ``__getattr__`` and ``__all__``."""
    run(module)

    def getattr_(name: str) -> Any:
        if name in names:
            return resolve(names[name])
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module).update(__getattr__=getattr_)
    if hasattr(module, "__all__"):  # for `from module import *`
        vars(module).update(__all__=[*module.__all__, *names])
    for alias, current in MODULES.items():
        # The import of a submodule would replace a function of the same name, e.g. ``losses.triplet_loss``.
        if alias.rpartition(".")[0] == module.__name__ and alias.rpartition(".")[2] in vars(module):
            sys.modules[alias] = importlib.import_module(current)


def resolve(path: str) -> Any:
    """Import the object with the full name ``path``, or the module if ``path`` is the name of a module."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(path)


def install() -> None:
    """Install the import hooks. They must be installed before the modules in ``NAMES`` are imported."""
    for hook in (_ModuleAliases, _AddedNames):
        if not any(isinstance(finder, hook) for finder in sys.meta_path):
            sys.meta_path.insert(0, hook())
