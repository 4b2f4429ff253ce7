"""Remove the components and modules of projects that tests import."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fastamp.utils import registry
from fastamp.utils.resources import resource_folder


@contextmanager
def unregister_projects() -> Iterator[None]:
    """Remove what is registered inside the context, and the modules of projects that are imported there."""
    components = {components: dict(components._components) for components in registry._REGISTRIES}
    modules, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        for component, names in components.items():
            for name in component._components.keys() - names:
                if not registry._is_built_in(component._components[name]):  # those stay, as their modules do
                    del component._components[name]
            component._components.update(names)
        folder = str(resource_folder("projects"))
        for name in set(sys.modules) - modules:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]
                # ``from package import module`` must not find it in a package that was imported before.
                package, _, module = name.rpartition(".")
                if package in sys.modules:
                    vars(sys.modules[package]).pop(module, None)
        sys.path[:] = path
