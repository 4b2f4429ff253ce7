"""Config keys that components declare in their own files."""

import ast
from pathlib import Path

from fastamp.config.key import Key

_PACKAGE = Path(__file__).parents[1]


def component_keys(package: Path = _PACKAGE) -> dict[str, Key]:
    """Return the keys of all components, in the order of their files' names.

    A loss, head, backbone, transform or data set declares its keys at the top of its own file::

        from fastamp.config import Key

        KEYS = (Key("MODEL.LOSSES.SUPCON.SCALE", 1.0, "Supervised contrastive loss: weight in the sum.", low=0),)

    Only that statement is evaluated, and nothing else of the file: the config does not depend on the packages that
    stand above it, and a command can read its config before it imports torch.

    Args:
        package: folder with a subfolder for each package. Default: fastamp.

    Returns:
        Path of each key -> the key.

    Raises:
        ValueError: two components declare the same key.
    """
    keys: dict[str, Key] = {}
    for file in sorted(package.glob("*/**/*.py")):
        names = file.relative_to(package).with_suffix("").parts
        # Editors and systems leave hidden files and copies, which are no modules.
        if names[0] == Path(__file__).parent.name or not all(name.isidentifier() for name in names):
            continue
        for key in declared_keys(file):
            if key.path in keys:
                raise ValueError(f"{file} declares the config key {key.path}, which another component has already")
            keys[key.path] = key
    return keys


def declared_keys(file: Path) -> tuple[Key, ...]:
    """Return the ``KEYS`` of a Python file, without importing it; empty if it has none.

    Raises:
        ValueError: the value is not a tuple of ``Key(...)`` with literals.
    """
    source = file.read_text(encoding="utf-8")
    if "\nKEYS" not in source:  # parsing all files takes half a second
        return ()
    for statement in ast.parse(source).body:
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "KEYS" for target in targets):
            try:
                value = eval(compile(ast.Expression(statement.value), str(file), "eval"), {"Key": Key})
            except NameError as error:
                raise ValueError(f"{file}:{statement.lineno}: KEYS needs Key(...) with literals: {error}") from error
            return value
    return ()
