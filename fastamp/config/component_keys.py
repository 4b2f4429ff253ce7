"""Config keys that components declare in their own files."""

import ast
from pathlib import Path

from fastamp.config.key import Key

_PACKAGE = Path(__file__).parents[1]
# Without components; a wheel has the projects below the package, which declare their keys when they are loaded.
_EXCLUDED = (Path(__file__).parent.name, "projects")


def component_keys(package: Path = _PACKAGE) -> dict[str, Key]:
    """Collect the config keys of all components, sorted by file name.

    A loss, head, backbone, transform or dataset declares its keys at the top of its file:

        from fastamp.config import Key

        KEYS = (Key("MODEL.LOSSES.SUPCON.SCALE", 1.0, "Supervised contrastive loss: weight in the total loss.", low=0),)

    Only the assignment to ``KEYS`` is evaluated; the file is not imported. Therefore, ``fastamp.config`` does not
    import the components, and a command can read its config before importing torch.

    Args:
        package: folder whose subfolders are searched for components. Default: the package fastamp.

    Returns:
        Dict from key path to key.

    Raises:
        ValueError: if two components declare the same key.
    """
    keys: dict[str, Key] = {}
    for file in sorted(package.glob("*/**/*.py")):
        names = file.relative_to(package).with_suffix("").parts
        # Skip hidden files and copies left by editors and operating systems.
        if names[0] in _EXCLUDED or not all(name.isidentifier() for name in names):
            continue
        for key in declared_keys(file):
            if key.path in keys:
                raise ValueError(
                    f"{file}: config key {key.path} is already declared by another component.\n  fix: rename it"
                )
            keys[key.path] = key
    return keys


def declared_keys(file: Path) -> tuple[Key, ...]:
    """Return the ``KEYS`` of a Python file without importing the file; () if it does not define ``KEYS``.

    Raises:
        ValueError: if an argument of ``Key(...)`` is a name instead of a literal.
    """
    statement = find_assignment(file, "KEYS")
    if statement is None:
        return ()
    try:
        keys: tuple[Key, ...] = eval(compile(ast.Expression(statement), str(file), "eval"), {"Key": Key})
    except NameError as error:
        raise ValueError(
            f"{file}:{statement.lineno}: KEYS: arguments of Key(...) must be literals: {error}.\n"
            "  fix: replace the name by its value"
        ) from error
    return keys


def find_assignment(file: Path, name: str) -> ast.expr | None:
    """Return the value that a Python file assigns to a name at its top level; None if there is no such assignment."""
    source = file.read_text(encoding="utf-8")
    if f"\n{name}" not in f"\n{source}":  # parsing all files takes half a second
        return None
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return statement.value
    return None
