"""No code of the package uses a private attribute of an object that another module defines."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fastamp"
ALLOWED = {
    # PyTorch's own, which have no public name.
    "_BatchNorm", "_InstanceNorm", "_ConvNd", "_C", "_to_copy", "_buffers", "_parameters", "_apply", "_version",
    "_compiled_call_impl", "_set_params_and_buffers_to_ignore_for_model",
    "_foreach_copy_", "_foreach_norm", "_foreach_mul_", "_foreach_sub", "_foreach_lerp_", "_foreach_clamp_min_",
    "_foreach_clamp_max_",
    # Of the standard library: a named tuple's copy with other values, and the end of a process.
    "_replace", "_exit",
    "_bit_generator",  # NumPy's RandomState
}  # fmt: skip


def defined(tree: ast.Module) -> set[str]:
    """Return the private names that a module defines: functions, methods, classes, variables, attributes of self."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.__dict__.update"
        for keyword in node.keywords
    }
    return names | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_its_own(node.value)
    }


def of_its_own(value: ast.expr) -> bool:
    """Return whether an expression is self, cls or super()."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign(source: str) -> Iterator[str]:
    """Yield ``"line: expression"`` of each private attribute of something that this source does not define."""
    tree = ast.parse(source)
    own = defined(tree) | ALLOWED
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        if is_private and not of_its_own(node.value) and node.attr not in own:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_object_reaches_into_another():
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{each}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for each in foreign(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source, expected",
    [
        ("loop._hooks = []", ["1: loop._hooks"]),
        ("def f(x):\n    return x.a._b", ["2: x.a._b"]),
        ("class A:\n    def f(self):\n        self._a = 1\n    def g(self, other):\n        return other._a", []),
        ("class A(B):\n    def f(self):\n        return super()._f() + self._g", []),
        ("torch._foreach_norm(x), x.__class__, _y", []),
    ],
)
def test_it_is_found(source, expected):
    """The negative control."""
    assert list(foreign(source)) == expected


def test_no_allowed_name_is_unused():
    used = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert ALLOWED - used == set()
