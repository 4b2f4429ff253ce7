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

_PROVIDERS = {
    "data.datasets.catalog": (
        "data.datasets.caviara data.datasets.cuhk_sysu data.datasets.dukemtmcreid data.datasets.grid "
        "data.datasets.iLIDS data.datasets.lpw data.datasets.pes3d data.datasets.pku data.datasets.prai "
        "data.datasets.prid data.datasets.saivt data.datasets.shinpuhkan data.datasets.sysu_mm "
        "data.datasets.thermalworld data.datasets.wildtracker"
    ),
    "fastreid.data": "data.common data.data_utils",
    "fastreid.datasets": "data.datasets.bases",
    "data.datasets.airportalert": "data.datasets.AirportALERT",
    "fastreid.evaluation": "evaluation.clas_evaluator evaluation.testing utils.compute_dist",
    "fastreid.layers": (
        "layers.activation layers.batch_norm layers.drop layers.helpers layers.non_local layers.weight_init"
    ),
    "fastreid.any_softmax": "layers.any_softmax",
    "layers.attention": "layers.se_layer",
    "modeling.backbones.mobilenet": "modeling.backbones.mobilenetv3",
    "modeling.backbones.vit": "modeling.backbones.vision_transformer",
    "modeling.losses.pairwise_cosine": "modeling.losses.circle_loss",
    "modeling.losses.cross_entropy": "modeling.losses.cross_entroy_loss",
    "modeling.losses.focal": "modeling.losses.focal_loss",
    "modeling.losses.triplet": "modeling.losses.triplet_loss",
    "fastreid.modeling": "modeling.losses.utils",
    "checkpoint.checkpointer": "utils.checkpoint",
    "fastreid.tools": "utils.collect_env utils.precision_bn utils.timer",
    "fastreid.files": "utils.file_io",
    "fastreid.events": "utils.history_buffer",
    "fastreid.solver": "utils.params",
    "fastreid.visualizer": "utils.visualizer",
}
"""Module of fastamp -> modules of FastReID whose names it provides, both without the package."""

MODULES = {
    f"fastamp.{alias}": f"fastamp.{module}" for module, aliases in _PROVIDERS.items() for alias in aliases.split()
}
"""Module of FastReID -> module that provides its names."""

_SOURCES: dict[str, dict[str, str]] = {
    "checkpoint.checkpointer": {
        "fastreid.files": "PathManager",
        "fastreid.checkpoint": "PeriodicCheckpointer get_missing_parameters_message get_unexpected_parameters_message",
    },
    "config": {"fastreid.config": "configurable"},
    "config.config": {"fastreid.config": "configurable"},
    "data": {"fastreid.data": "CommDataset"},
    "data.build": {"fastreid.data": "CommDataset _root fast_batch_collator"},
    "data.transforms": {"fastreid.data": "ToTensor"},
    "engine": {
        "fastreid.engine": "DefaultPredictor",
        "fastreid.hooks": "CallbackHook IterationTimer LayerFreeze PreciseBN",
        "engine.hooks": "EvalHook LRScheduler PeriodicCheckpointer PeriodicWriter",
    },
    "engine.defaults": {
        "fastreid.engine": "DefaultPredictor",
        "engine.train_loop": "AMPTrainer SimpleTrainer",
        "utils.arguments": "default_argument_parser",
        "engine.setup": "default_setup",
    },
    "engine.hooks": {
        "fastreid.hooks": "CallbackHook IterationTimer LayerFreeze PreciseBN",
        "fastreid.evaluation": "flatten_results_dict",
        "fastreid.tools": "get_bn_modules",
    },
    "evaluation": {"fastreid.evaluation": "ClasEvaluator aqe inference_context evaluate_rank print_csv_format"},
    "evaluation.evaluator": {"evaluation.reid_evaluation": "ReidEvaluator", "fastreid.evaluation": "inference_context"},
    "evaluation.query_expansion": {"fastreid.evaluation": "aqe"},
    "evaluation.rank": {"fastreid.evaluation": "eval_cuhk03 eval_market1501 evaluate_rank"},
    "evaluation.rerank": {"fastreid.evaluation": "re_ranking"},
    "layers": {
        "fastreid": "any_softmax",
        "layers.pooling": (
            "AdaptiveAvgMaxPool ClipGlobalAvgPool Flatten GeneralizedMeanPooling GeneralizedMeanPoolingP "
            "GlobalAvgPool GlobalMaxPool Identity"
        ),
        "fastreid.layers": (
            "DropPath FastGlobalAvgPool FrozenBatchNorm GELU MemoryEfficientSwish Mish Non_local Swish SyncBatchNorm "
            "drop_path get_norm make_divisible to_2tuple trunc_normal_ weights_init_classifier weights_init_kaiming"
        ),
    },
    "layers.norm": {"fastreid.layers": "get_norm"},
    "layers.pooling": {"fastreid.layers": "FastGlobalAvgPool"},
    "modeling.backbones": {
        "fastreid.modeling": (
            "build_effnet_backbone build_mobilenetv2_backbone build_mobilenetv3_backbone build_osnet_backbone "
            "build_regnet_backbone build_repvgg_backbone build_resnest_backbone build_resnet_backbone "
            "build_shufflenetv2_backbone build_vit_backbone"
        ),
    },
    "solver": {"fastreid.solver": "build_lr_scheduler"},
    "solver.build": {"fastreid.solver": "build_lr_scheduler"},
    "utils.comm": {"fastreid.comm": "gather get_local_rank get_local_size reduce_dict shared_random_seed"},
    "utils.env": {"fastreid.tools": "seed_all_rng"},
    "utils.events": {"fastreid.events": "CommonMetricPrinter EventStorage EventWriter get_event_storage"},
    "utils.logger": {"fastreid.files": "PathManager"},
}
"""Module of fastamp -> module -> names that it adds, both without the package."""

NAMES = {
    f"fastamp.{module}": {
        name: f"fastamp.{source}.{name}" for source, names in sources.items() for name in names.split()
    }
    for module, sources in _SOURCES.items()
} | {
    "fastamp.modeling.heads": {"REID_HEADS_REGISTRY": "fastamp.modeling.heads.build.HEADS_REGISTRY"},
    "fastamp.modeling.heads.build": {"REID_HEADS_REGISTRY": "fastamp.modeling.heads.build.HEADS_REGISTRY"},
    "fastamp.modeling.losses.pairwise_cosine": {
        "pairwise_circleloss": "fastamp.modeling.losses.pairwise_cosine.pairwise_circle_loss"
    },
    "fastamp.modeling.losses": {"pairwise_circleloss": "fastamp.modeling.losses.pairwise_cosine.pairwise_circle_loss"},
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
