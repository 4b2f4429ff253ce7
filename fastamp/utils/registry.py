"""One registry class through which everything that a config names is looked up and built."""

from collections.abc import Callable, Iterator
from typing import Any

from fastamp.utils.errors import ConfigError, did_you_mean


class Registry:
    """Map the names that a config uses to the components that they stand for.

    Args:
        kind: what is registered, in the words of the config, e.g. ``"MODEL.BACKBONE.NAME"``;
            error messages use it.

    A component is a class with a classmethod ``from_config(cfg, **context)`` that returns an
    instance, or a function ``build_x(cfg, **context)``::

        @BACKBONE_REGISTRY.register()
        def build_resnet_backbone(cfg): ...

        backbone = BACKBONE_REGISTRY.build(cfg.MODEL.BACKBONE.NAME, cfg)
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._components: dict[str, Any] = {}

    def register(self, name: str | None = None) -> Callable[[Any], Any]:
        """Return a decorator that registers a class or function under ``name`` or its own name.

        Raises:
            KeyError: the name is taken already by another component.
        """

        def add(component: Any) -> Any:
            key = name or component.__name__
            if key in self._components:
                raise KeyError(f"{self.kind}: {key!r} is registered already, as {self._components[key]!r}")
            self._components[key] = component
            return component

        return add

    def get(self, name: str) -> Any:
        """Return the component registered under ``name``.

        Raises:
            ConfigError: nothing has that name; the message lists the choices and the nearest one.
        """
        if name not in self._components:
            choices = ", ".join(sorted(self._components)) or "none"
            raise ConfigError(
                f"{self.kind}: nothing is registered under {name!r}.{did_you_mean(name, self._components)}"
                f"\n  choices: {choices}"
            )
        return self._components[name]

    def build(self, name: str, cfg: Any, **context: Any) -> Any:
        """Look ``name`` up and build it from ``cfg``; ``context`` is passed on to the component."""
        component = self.get(name)
        return getattr(component, "from_config", component)(cfg, **context)

    def __contains__(self, name: str) -> bool:
        return name in self._components

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._components))
