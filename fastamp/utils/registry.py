"""Registry of components that a config selects by name."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.plugins import load_installed_plugins

_REGISTRIES: list["Registry"] = []


def registered_names() -> dict[str, list[str]]:
    """Return the registered names for each config key that selects a component of a registry."""
    return {key: list(registry) for registry in _REGISTRIES for key in registry.kind.split(" / ")}


class Registry:
    """Registry that maps names in a config to components.

    Args:
        kind: config key that selects the component, for error messages, e.g. ``"MODEL.BACKBONE.NAME"``.
        components: dict that holds the components. Default: a new dict.

    A component is a class with a classmethod ``from_config(cfg, **context)``, which returns an object or, as in
    FastReID, a dict of the constructor's arguments; or a function ``build_x(cfg, **context)``:

        @BACKBONE_REGISTRY.register()
        def build_resnet_backbone(cfg): ...

        backbone = BACKBONE_REGISTRY.build(cfg.MODEL.BACKBONE.NAME, cfg)

    Components of installed plugins are found, too (``utils/plugins.py``).
    """

    def __init__(self, kind: str, components: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self._components = {} if components is None else components
        _REGISTRIES.append(self)

    def register(self, name: str | None = None) -> Callable[[Any], Any]:
        """Create a decorator that registers a class or function.

        Args:
            name: name of the component. Default: ``__name__`` of the class or function.

        Raises:
            KeyError: if the name is already registered.
        """

        def add(component: Any) -> Any:
            key = name or component.__name__
            if key in self._components:
                raise KeyError(f"{self.kind}: {key!r} is already registered: {self._components[key]!r}")
            self._components[key] = component
            return component

        return add

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

    def build(self, name: str, cfg: Any, **context: Any) -> Any:
        """Build the component registered under ``name``.

        Args:
            name: name of the component.
            cfg: config passed to the component.
            context: additional keyword arguments for the component.
        """
        component = self.get(name)
        build = component if _has_own_constructor(component) else getattr(component, "from_config", component)
        built = build(cfg, **context)
        if isinstance(built, dict) and isinstance(component, type):
            return component(**built)
        return built

    def __contains__(self, name: str) -> bool:
        if name not in self._components:
            load_installed_plugins()
        return name in self._components

    def __iter__(self) -> Iterator[str]:
        load_installed_plugins()
        return iter(sorted(self._components))


def _has_own_constructor(component: Any) -> bool:
    """Return True for a class that inherits ``from_config`` and defines ``__init__(self, cfg)``, as in FastReID."""
    if not isinstance(component, type):
        return False
    for each in component.__mro__:
        if "from_config" in vars(each):
            return False
        if "__init__" in vars(each):
            return list(inspect.signature(each.__init__).parameters)[1:2] == ["cfg"]
    return False
