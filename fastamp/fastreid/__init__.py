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
    "fastamp.data.common": "fastamp.fastreid.data",
    "fastamp.data.data_utils": "fastamp.fastreid.data",
    "fastamp.data.datasets.bases": "fastamp.fastreid.datasets",
    "fastamp.data.datasets.AirportALERT": "fastamp.data.datasets.airportalert",
    "fastamp.evaluation.clas_evaluator": "fastamp.fastreid.evaluation",
    "fastamp.evaluation.testing": "fastamp.fastreid.evaluation",
    "fastamp.layers.activation": "fastamp.fastreid.layers",
    "fastamp.layers.any_softmax": "fastamp.fastreid.any_softmax",
    "fastamp.layers.batch_norm": "fastamp.fastreid.layers",
    "fastamp.layers.drop": "fastamp.fastreid.layers",
    "fastamp.layers.helpers": "fastamp.fastreid.layers",
    "fastamp.layers.non_local": "fastamp.fastreid.layers",
    "fastamp.layers.se_layer": "fastamp.layers.attention",
    "fastamp.layers.weight_init": "fastamp.fastreid.layers",
    "fastamp.modeling.backbones.mobilenetv3": "fastamp.modeling.backbones.mobilenet",
    "fastamp.modeling.backbones.vision_transformer": "fastamp.modeling.backbones.vit",
    "fastamp.modeling.losses.circle_loss": "fastamp.modeling.losses.pairwise_cosine",
    "fastamp.modeling.losses.cross_entroy_loss": "fastamp.modeling.losses.cross_entropy",
    "fastamp.modeling.losses.focal_loss": "fastamp.modeling.losses.focal",
    "fastamp.modeling.losses.triplet_loss": "fastamp.modeling.losses.triplet",
    "fastamp.modeling.losses.utils": "fastamp.fastreid.modeling",
    "fastamp.utils.checkpoint": "fastamp.checkpoint.checkpointer",
    "fastamp.utils.collect_env": "fastamp.fastreid.tools",
    "fastamp.utils.compute_dist": "fastamp.fastreid.evaluation",
    "fastamp.utils.file_io": "fastamp.fastreid.files",
    "fastamp.utils.history_buffer": "fastamp.fastreid.events",
    "fastamp.utils.params": "fastamp.fastreid.solver",
    "fastamp.utils.precision_bn": "fastamp.fastreid.tools",
    "fastamp.utils.timer": "fastamp.fastreid.tools",
    "fastamp.utils.visualizer": "fastamp.fastreid.visualizer",
}
"""Module of FastReID -> module that provides its names."""

NAMES = {
    "fastamp.checkpoint.checkpointer": {
        "PathManager": "fastamp.fastreid.files.PathManager",
        "PeriodicCheckpointer": "fastamp.fastreid.checkpoint.PeriodicCheckpointer",
        "get_missing_parameters_message": "fastamp.fastreid.checkpoint.get_missing_parameters_message",
        "get_unexpected_parameters_message": "fastamp.fastreid.checkpoint.get_unexpected_parameters_message",
    },
    "fastamp.config": {"configurable": "fastamp.fastreid.config.configurable"},
    "fastamp.config.config": {"configurable": "fastamp.fastreid.config.configurable"},
    "fastamp.data": {"CommDataset": "fastamp.fastreid.data.CommDataset"},
    "fastamp.data.build": {
        "CommDataset": "fastamp.fastreid.data.CommDataset",
        "_root": "fastamp.fastreid.data._root",
        "fast_batch_collator": "fastamp.fastreid.data.fast_batch_collator",
    },
    "fastamp.data.transforms": {"ToTensor": "fastamp.fastreid.data.ToTensor"},
    "fastamp.engine": {"DefaultPredictor": "fastamp.fastreid.engine.DefaultPredictor"}
    | {
        name: f"fastamp.fastreid.hooks.{name}"
        for name in ("CallbackHook", "IterationTimer", "LayerFreeze", "PreciseBN")
    }
    | {
        name: f"fastamp.engine.hooks.{name}"
        for name in ("EvalHook", "LRScheduler", "PeriodicCheckpointer", "PeriodicWriter")
    },
    "fastamp.engine.defaults": {
        "DefaultPredictor": "fastamp.fastreid.engine.DefaultPredictor",
        "AMPTrainer": "fastamp.engine.train_loop.AMPTrainer",
        "SimpleTrainer": "fastamp.engine.train_loop.SimpleTrainer",
        "default_argument_parser": "fastamp.utils.arguments.default_argument_parser",
        "default_setup": "fastamp.engine.setup.default_setup",
    },
    "fastamp.engine.hooks": {
        "CallbackHook": "fastamp.fastreid.hooks.CallbackHook",
        "IterationTimer": "fastamp.fastreid.hooks.IterationTimer",
        "LayerFreeze": "fastamp.fastreid.hooks.LayerFreeze",
        "PreciseBN": "fastamp.fastreid.hooks.PreciseBN",
        "flatten_results_dict": "fastamp.fastreid.evaluation.flatten_results_dict",
        "get_bn_modules": "fastamp.fastreid.tools.get_bn_modules",
    },
    "fastamp.evaluation": {
        "ClasEvaluator": "fastamp.fastreid.evaluation.ClasEvaluator",
        "aqe": "fastamp.fastreid.evaluation.aqe",
        "inference_context": "fastamp.fastreid.evaluation.inference_context",
        "evaluate_rank": "fastamp.fastreid.evaluation.evaluate_rank",
        "print_csv_format": "fastamp.fastreid.evaluation.print_csv_format",
    },
    "fastamp.evaluation.evaluator": {
        "ReidEvaluator": "fastamp.evaluation.reid_evaluation.ReidEvaluator",
        "inference_context": "fastamp.fastreid.evaluation.inference_context",
    },
    "fastamp.evaluation.query_expansion": {"aqe": "fastamp.fastreid.evaluation.aqe"},
    "fastamp.evaluation.rank": {
        name: f"fastamp.fastreid.evaluation.{name}" for name in ("eval_cuhk03", "eval_market1501", "evaluate_rank")
    },
    "fastamp.evaluation.rerank": {"re_ranking": "fastamp.fastreid.evaluation.re_ranking"},
    "fastamp.layers": {"any_softmax": "fastamp.fastreid.any_softmax"}
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
        name: f"fastamp.fastreid.layers.{name}"
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
    "fastamp.layers.norm": {"get_norm": "fastamp.fastreid.layers.get_norm"},
    "fastamp.layers.pooling": {"FastGlobalAvgPool": "fastamp.fastreid.layers.FastGlobalAvgPool"},
    "fastamp.modeling.backbones": {
        f"build_{name}_backbone": f"fastamp.fastreid.modeling.build_{name}_backbone"
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
    "fastamp.solver": {"build_lr_scheduler": "fastamp.fastreid.solver.build_lr_scheduler"},
    "fastamp.solver.build": {"build_lr_scheduler": "fastamp.fastreid.solver.build_lr_scheduler"},
    "fastamp.utils.comm": {
        name: f"fastamp.fastreid.comm.{name}"
        for name in ("gather", "get_local_rank", "get_local_size", "reduce_dict", "shared_random_seed")
    },
    "fastamp.utils.env": {"seed_all_rng": "fastamp.fastreid.tools.seed_all_rng"},
    "fastamp.utils.events": {
        name: f"fastamp.fastreid.events.{name}"
        for name in ("CommonMetricPrinter", "EventStorage", "EventWriter", "get_event_storage")
    },
    "fastamp.utils.logger": {"PathManager": "fastamp.fastreid.files.PathManager"},
}
"""Module of fastamp -> name in FastReID -> module and name of the object."""


class _ModuleAliases(MetaPathFinder, Loader):
    """Import hook that maps module names to the module objects imported under other names.

    Args:
        module_of: returns the name of the module for a name, or None if the name is not an alias.
    """

    def __init__(self, module_of: Callable[[str], str | None]) -> None:
        self.module_of = module_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if self.module_of(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(str(self.module_of(spec.name)))
        except ModuleNotFoundError as error:
            if error.name != self.module_of(spec.name):
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
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
    if not any(isinstance(finder, _AddedNames) for finder in sys.meta_path):
        sys.meta_path[:0] = [_AddedNames(), _ModuleAliases(MODULES.get)]


def provide_fastreid() -> None:
    """Let ``import fastreid`` import fastamp in this process, also if FastReID is installed."""

    def module_of(name: str) -> str | None:
        return f"fastamp{name[8:]}" if name.partition(".")[0] == "fastreid" else None

    sys.meta_path.insert(0, _ModuleAliases(module_of))
