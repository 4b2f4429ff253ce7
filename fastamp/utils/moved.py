"""Old names of modules, functions, keyword arguments and attributes: they still work, with a DeprecationWarning."""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, TypeVar

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

MODULES = {
    "fastamp.amp.crash": "fastamp.diagnostics.crash",
    "fastamp.amp.devices": "fastamp.diagnostics.environment_queries",
    "fastamp.amp.doctor": "fastamp.diagnostics.doctor",
    "fastamp.amp.half": "fastamp.amp.fp16_export",
    "fastamp.amp.health": "fastamp.amp.checks",
    "fastamp.amp.layer_check": "fastamp.diagnostics.layer_check",
    "fastamp.amp.locate": "fastamp.diagnostics.nan_locator",
    "fastamp.amp.machine": "fastamp.diagnostics.environment",
    "fastamp.amp.precautions": "fastamp.diagnostics.precision_diagnostics",
    "fastamp.amp.preflight": "fastamp.diagnostics.preflight",
    "fastamp.amp.refusal": "fastamp.amp.device_errors",
    "fastamp.amp.rehearsal": "fastamp.diagnostics.isolated_passes",
    "fastamp.amp.ten_steps": "fastamp.diagnostics.smoke_train",
    "fastamp.cli.pictures": "fastamp.inference.visualize",
    "fastamp.data.aside": "fastamp.utils.atomic_dir",
    "fastamp.data.datasets.caviara": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.cuhksysu": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.dukemtmc": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.grid": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.ilids": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.lpw": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.named": "fastamp.data.datasets.filename_dataset",
    "fastamp.data.datasets.near": "fastamp.data.datasets.path_hints",
    "fastamp.data.datasets.occludedduke": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.own": "fastamp.data.datasets.custom",
    "fastamp.data.datasets.pes3d": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.pku": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.prai": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.prid": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.saivt": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.shinpuhkan": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.sysu_mm": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.thermalworld": "fastamp.data.datasets.catalog",
    "fastamp.data.datasets.tree": "fastamp.data.datasets.file_utils",
    "fastamp.data.datasets.wildtrackcrop": "fastamp.data.datasets.catalog",
    "fastamp.data.demo": "fastamp.demo",
    "fastamp.data.missing": "fastamp.data.missing_images",
    "fastamp.data.store": "fastamp.data.cache",
    "fastamp.data.transforms.colour": "fastamp.data.transforms.color",
    "fastamp.diagnostics.devices": "fastamp.diagnostics.environment_queries",
    "fastamp.diagnostics.locate": "fastamp.diagnostics.nan_locator",
    "fastamp.diagnostics.location": "fastamp.diagnostics.nan_location",
    "fastamp.diagnostics.machine": "fastamp.diagnostics.environment",
    "fastamp.diagnostics.measures": "fastamp.diagnostics.profiling",
    "fastamp.diagnostics.observer": "fastamp.diagnostics.nan_observer",
    "fastamp.diagnostics.precautions": "fastamp.diagnostics.precision_diagnostics",
    "fastamp.diagnostics.rehearsal": "fastamp.diagnostics.isolated_passes",
    "fastamp.diagnostics.ten_steps": "fastamp.diagnostics.smoke_train",
    "fastamp.engine.averaging": "fastamp.engine.hooks.averaging",
    "fastamp.engine.best": "fastamp.engine.hooks.evaluation",
    "fastamp.engine.diagnosis": "fastamp.diagnostics.doctor_report",
    "fastamp.engine.doctor": "fastamp.diagnostics.doctor",
    "fastamp.engine.freezing": "fastamp.engine.hooks.freeze",
    "fastamp.engine.lifeline": "fastamp.engine.failure_monitor",
    "fastamp.engine.monitors": "fastamp.engine.hooks.activations",
    "fastamp.engine.replay": "fastamp.diagnostics.replay",
    "fastamp.engine.saving": "fastamp.engine.hooks.checkpoint",
    "fastamp.evaluation.details": "fastamp.evaluation.retrieval_examples",
    "fastamp.evaluation.floors": "fastamp.evaluation.baselines",
    "fastamp.evaluation.judge": "fastamp.evaluation.metrics",
    "fastamp.evaluation.matches": "fastamp.evaluation.protocol",
    "fastamp.evaluation.neighbours": "fastamp.evaluation.neighbors",
    "fastamp.evaluation.reid_evaluator": "fastamp.evaluation.reid_evaluation",
    "fastamp.evaluation.report": "fastamp.evaluation.results_table",
    "fastamp.inference.export_formats": "fastamp.inference.export.formats",
    "fastamp.inference.strip": "fastamp.checkpoint.strip",
    "fastamp.modeling.backbones.names": "fastamp.checkpoint.state_dict_conversion",
    "fastamp.modeling.backbones.options": "fastamp.modeling.backbones.build_utils",
    "fastamp.modeling.memory": "fastamp.modeling.out_of_memory",
    "fastamp.modeling.meta_arch.origins": "fastamp.checkpoint.state_dict_conversion",
    "fastamp.modeling.recognize": "fastamp.modeling.infer_config",
    "fastamp.modeling.weights": "fastamp.checkpoint.pretrained",
    "fastamp.utils.aside": "fastamp.utils.atomic_dir",
    "fastamp.utils.checkpoint": "fastamp.checkpoint.checkpointer",
    "fastamp.utils.form": "fastamp.utils.structure",
    "fastamp.utils.load_state": "fastamp.checkpoint.load_state",
    "fastamp.utils.pickle_limits": "fastamp.checkpoint.pickle_limits",
    "fastamp.utils.printable": "fastamp.utils.terminal_text",
    "fastamp.utils.weights_file": "fastamp.checkpoint.weights_file",
}
"""Old name of a module or package -> current name. Submodules of a package need no entry of their own."""


class ModuleAliases(MetaPathFinder, Loader):
    """Import hook that maps the alias of a module to the module object imported under its current name.

    Args:
        lookup: function from an alias to the current name; returns None for any other name.
        deprecated: warn with a DeprecationWarning. Default True.
    """

    def __init__(self, lookup: Callable[[str], str | None], *, deprecated: bool = True) -> None:
        self.lookup, self.deprecated = lookup, deprecated

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if self.lookup(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self.lookup(spec.name)
        assert new is not None
        if self.deprecated:
            warnings.warn(f"{spec.name} is deprecated; use {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state  # the import system has replaced it by that of the alias

    def install(self) -> None:
        """Put the hook first: other finders would find a submodule by the path of its package, and import it twice."""
        if not any(isinstance(each, ModuleAliases) and each.lookup == self.lookup for each in sys.meta_path):
            sys.meta_path.insert(0, self)


def new_module_name(old: str) -> str | None:
    """Return the current name of the module ``old``; None if the module was not moved."""
    if not old.startswith("fastamp."):
        return None
    for name, new in MODULES.items():
        if old == name or old.startswith(name + "."):
            return new + old[len(name) :]
    return None


def moved_names(module: str, new: dict[str, str]) -> Callable[[str], Any]:
    """Create the ``__getattr__`` of a module with deprecated names.

    Args:
        module: ``__name__`` of the module.
        new: old name -> full current name, ``"package.module.name"``.
    """

    def getattr_(name: str) -> Any:
        if name not in new:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is deprecated; use {new[name]}", DeprecationWarning, stacklevel=2)
        where, _, attribute = new[name].rpartition(".")
        return getattr(importlib.import_module(where), attribute)

    return getattr_


def renamed_arguments(**new: str | tuple[str, Callable[[Any], Any]]) -> Callable[[Decorated], Decorated]:
    """Create a decorator that accepts old names of keyword arguments, with a DeprecationWarning.

    It decorates functions, methods and classes, including dataclasses. The next release will remove the old names.

    Args:
        new: old name -> new name, or old name -> ``(new name, function that converts the old value)``.

    Raises:
        TypeError: if an argument is passed under both names.
    """

    def decorate(function: Decorated) -> Decorated:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)
            return function

        title = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in kwargs.keys() & new.keys():
                name, convert = (new[old], None) if isinstance(new[old], str) else new[old]
                if name in kwargs:
                    raise TypeError(f"{title}() got both {name!r} and its old name {old!r}")
                text = f"argument {old!r} of {title}() is deprecated; use {name!r}"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                value = kwargs.pop(old)
                kwargs[name] = convert(value) if convert else value
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """Return a property that reads and writes the attribute ``new`` under its old name, with a DeprecationWarning.

    Args:
        old: name that the property is assigned to in the class body.
        new: current name.
    """

    def warn(owner: object) -> None:
        name = type(owner).__name__
        warnings.warn(f"{name}.{old} is deprecated; use {name}.{new}", DeprecationWarning, stacklevel=3)

    def read(self: object) -> Any:
        warn(self)
        return getattr(self, new)

    def write(self: object, value: Any) -> None:
        warn(self)
        setattr(self, new, value)

    return property(read, write, doc=f"Old name of ``{new}``.")


def install() -> None:
    """Install the import hook for old module names."""
    ModuleAliases(new_module_name).install()
