"""Registry of components that a config selects by name."""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.plugins import load_installed_plugins

logger = logging.getLogger(__name__)

Component = TypeVar("Component")

_REGISTRIES: list["Registry"] = []


def registered_names() -> dict[str, list[str]]:
    """Return the registered names for each config key that selects a component of a registry."""
    return {key: list(registry) for registry in _REGISTRIES for key in registry.kind.split(" / ")}


def adopt(component: Component, contract: type) -> Component:
    """Give a component the defaults of the optional members of a contract that it lacks, and return it.

    Args:
        component: class, function or object; one that derives from the contract lacks none.
        contract: class whose public attributes and class methods are the defaults. Its other methods are
            not copied.
    """
    for name, default in vars(contract).items():
        if not name.startswith("_") and not inspect.isfunction(default) and not hasattr(component, name):
            setattr(component, name, getattr(contract, name))
    return component


class DuplicateNameError(ConfigError, KeyError):
    """A component is registered under a name that another one has."""

    __str__ = Exception.__str__


class Registry:
    """Registry that maps names in a config to components.

    Args:
        kind: config key that selects the component, for error messages, e.g. ``"MODEL.BACKBONE.NAME"``.
        components: dict that holds the components. Default: a new dict.
        modules: modules of fastamp that register further components; imported if a name is not found, or to list the
            names. Default ().
        replaces_built_in: whether a component from outside fastamp replaces, with a warning, one of fastamp of the same
            name. Default False: that is an error.
        contract: class with the optional members of a component and their defaults; a component that lacks one gets it
            when it is registered, see ``adopt``. Default: none.

    A component is a class with a classmethod ``from_config(cfg, **context)``, which returns an object or a dict of the
    constructor's arguments; a class whose attribute ``takes_config`` is True, which is called with the config; or a
    function ``build_x(cfg, **context)``:

        @BACKBONE_REGISTRY.register()
        def build_resnet_backbone(cfg): ...

        backbone = BACKBONE_REGISTRY.build(cfg.MODEL.BACKBONE.NAME, cfg)

    Components of installed plugins are found, too (``utils/plugins.py``).
    """

    def __init__(
        self,
        kind: str,
        components: dict[str, Any] | None = None,
        *,
        modules: Sequence[str] = (),
        replaces_built_in: bool = False,
        contract: type = object,
    ) -> None:
        self.kind, self._modules = kind, modules
        self._replaces_built_in, self._contract = replaces_built_in, contract
        self._components = {} if components is None else components
        _REGISTRIES.append(self)

    def register(self, name: Any = None) -> Callable[[Any], Any]:
        """Create a decorator that registers a class or function.

        Args:
            name: name of the component. Default: ``__name__`` of the class or function. If it is a class or function,
                it is registered, as by ``@REGISTRY.register`` without parentheses.

        Raises:
            DuplicateNameError: if the name is already registered for a component that is not from the same place in the
                same file, which is replaced.
        """

        if callable(name):
            return self.register()(name)

        def add(component: Any) -> Any:
            key = name or component.__name__
            if not _is_built_in(component):
                self._import_modules()
            if key in self._components:
                self._check_replaceable(key, component)
            self._components[key] = adopt(component, self._contract)
            return component

        return add

    def _check_replaceable(self, name: str, component: Any) -> None:
        existing = self._components[name]
        if _source(existing) == _source(component):  # the file is loaded again
            return
        if self._replaces_built_in and _is_built_in(existing) and not _is_built_in(component):
            logger.warning(
                "%s: %s of %s replaces that of fastamp\n  fix: to use both, register yours under another name",
                self.kind,
                name,
                _source(component)[0],
            )
            return
        raise DuplicateNameError(
            f"{self.kind}: {name!r} is already registered: {existing!r}.\n  fix: register it under another name"
        )

    def get(self, name: str) -> Any:
        """Return the component registered under ``name``.

        Raises:
            ConfigError: if the name is not registered; the message lists the choices and suggests the nearest one.
        """
        if name not in self:
            choices = ", ".join(sorted(self._components)) or "none"
            raise ConfigError(
                f"{self.kind}: unknown name {name!r}.{did_you_mean(name, self._components)}\n  choices: {choices}"
            )
        return self._components[name]

    def builder(self, name: str) -> Callable[..., Any]:
        """Return the function ``(cfg, **context)`` that builds the component registered under ``name``."""
        component = self.get(name)
        takes_config = getattr(component, "takes_config", False)
        build: Callable[..., Any] = component if takes_config else getattr(component, "from_config", component)
        return build

    def build(self, name: str, cfg: Any, **context: Any) -> Any:
        """Build the component registered under ``name``.

        Args:
            name: name of the component.
            cfg: config passed to the component.
            context: additional keyword arguments for the component.
        """
        component, built = self.get(name), self.builder(name)(cfg, **context)
        if isinstance(built, dict) and isinstance(component, type):
            return component(**built)
        return built

    def __contains__(self, name: str) -> bool:
        if name not in self._components:
            self._import_all()
        return name in self._components

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(sorted(self._components))

    def _import_all(self) -> None:
        self._import_modules()
        load_installed_plugins()

    def _import_modules(self) -> None:
        for module in self._modules:
            importlib.import_module(module)
        self._modules = ()


def _source(component: Any) -> tuple[str, str]:
    """Return the file, or the module without a file, and the name of a component in it."""
    module = getattr(component, "__module__", type(component).__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    return file or module, getattr(component, "__qualname__", repr(component))


def _is_built_in(component: Any) -> bool:
    return getattr(component, "__module__", type(component).__module__).partition(".")[0] == "fastamp"
