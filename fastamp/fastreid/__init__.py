"""FastReID's Python API on top of fastamp: ``import fastamp.fastreid as fastreid``.

Modules that differ from fastamp's are files of this package. The others have the names of a module of fastamp; they are
imported on first access.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

__version__ = "1.3"
"""Release of FastReID whose names this package has."""

_PROVIDERS = {
    "fastreid.data.datasets.registered": (
        "data.datasets.AirportALERT data.datasets.caviara data.datasets.cuhk03 data.datasets.cuhk_sysu "
        "data.datasets.dukemtmcreid data.datasets.grid data.datasets.iLIDS data.datasets.lpw data.datasets.market1501 "
        "data.datasets.msmt17 data.datasets.pes3d data.datasets.pku data.datasets.prai data.datasets.prid "
        "data.datasets.saivt data.datasets.sensereid data.datasets.shinpuhkan data.datasets.sysu_mm "
        "data.datasets.thermalworld data.datasets.vehicleid data.datasets.veri data.datasets.veriwild "
        "data.datasets.viper data.datasets.wildtracker"
    ),
    "fastreid.data.samplers": (
        "data.samplers.data_sampler data.samplers.imbalance_sampler data.samplers.triplet_sampler"
    ),
    "fastreid.data.transforms": "data.transforms.transforms",
    "fastreid.layers": (
        "layers.activation layers.batch_norm layers.drop layers.helpers layers.non_local layers.pooling "
        "layers.se_layer layers.weight_init"
    ),
    "modeling.backbones.mobilenet": "modeling.backbones.mobilenetv3",
    "modeling.backbones.vit": "modeling.backbones.vision_transformer",
    "fastreid.utils.events": "utils.history_buffer",
}
"""Module of fastamp -> modules of FastReID whose names it provides, both without the package."""

MODULES = {
    f"{__name__}.{alias}": f"fastamp.{module}" for module, aliases in _PROVIDERS.items() for alias in aliases.split()
}
"""Module of FastReID -> module that provides its names."""


class _Modules(MetaPathFinder, Loader):
    """Import hook for the modules of this package without a file; used after the search for files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        try:
            provider = find_spec(_provider(fullname))
        except ModuleNotFoundError:
            return None
        if provider is None:
            return None
        return spec_from_loader(fullname, self, is_package=provider.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        provider = importlib.import_module(_provider(module.__name__))
        public = getattr(provider, "__all__", None) or [
            name
            for name, value in vars(provider).items()
            if not name.startswith("_") and not isinstance(value, ModuleType)
        ]

        def getattr_(name: str) -> Any:
            value = getattr(provider, name, None)
            # Submodules are imported below this package. ``__path__`` and the like are those of this module.
            if value is None or name.startswith("__") or _is_submodule(value, provider):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return value

        vars(module).update(__getattr__=getattr_, __doc__=provider.__doc__, __all__=public)
        for alias in MODULES:
            # The import of a submodule would replace a function of the same name, e.g. ``losses.triplet_loss``.
            parent, _, name = alias.rpartition(".")
            if parent == module.__name__ and name in vars(provider):
                importlib.import_module(alias)
                vars(module)[name] = vars(provider)[name]


def _provider(name: str) -> str:
    """Return the module of fastamp that provides the names of a module of this package."""
    return MODULES.get(name, f"fastamp.{name.removeprefix(__name__ + '.')}")


def _is_submodule(value: Any, package: ModuleType) -> bool:
    return isinstance(value, ModuleType) and value.__name__.rpartition(".")[0] == package.__name__


class _Aliases(MetaPathFinder, Loader):
    """Import hook that maps ``fastreid`` and its modules to this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname.partition(".")[0] == "fastreid" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = f"fastamp.{spec.name}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state  # the import system has replaced it by that of the alias


def provide_fastreid() -> None:
    """Let ``import fastreid`` import this package in this process, also if FastReID is installed."""
    sys.meta_path.insert(0, _Aliases())


sys.meta_path.append(_Modules())
logging.getLogger("fastreid").parent = logging.getLogger("fastamp")
