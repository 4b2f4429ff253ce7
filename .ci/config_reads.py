"""Check which objects read the config: ``python .ci/config_reads.py``.

Functions and class methods read the config to build something. Instances do not: constructors, forward passes, losses,
samplers, transforms and indices take plain values. Classes that own the config of a run are listed in ``OWNERS``.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OWNERS = {
    "DefaultTrainer", "ClusterTrainer", "GraphTrainer", "TrialTrainer",
    "ReidEvaluator", "DsrEvaluator", "MatchingEvaluator", "RetriEvaluator", "FaceEvaluator", "ClasEvaluator",
    "AttrEvaluator", "JointAttrEvaluator", "AttributeTotals",
    "Predictor", "ModelInputs", "FeatureExtractor", "RankedImages", "_Network",  # the config of a checkpoint
    "ConfigText", "LoadedModel", "Run",
    "PositionGrid",  # the config of a weights file
    "ClassDataset",  # ImageDataset.adapt_config
    "Search", "Space", "TuneReportHook",
}  # fmt: skip
"""Classes whose instances may read or store the config."""

NOT_CHECKED = ("fastamp/config/", "fastamp/fastreid/")
"""The config itself, and FastReID's interface, in which constructors take the config."""
_NAMES = ("cfg", "config", "_cfg", "_config")


def _is_config(node: ast.expr) -> bool:
    """Return True for ``cfg``, ``config`` and attributes of these names."""
    return (isinstance(node, ast.Name) and node.id in _NAMES) or (
        isinstance(node, ast.Attribute) and node.attr in _NAMES
    )


def _of_the_class(method: ast.FunctionDef) -> bool:
    """Return True for class methods and static methods."""
    return any(
        isinstance(name, ast.Name) and name.id in ("classmethod", "staticmethod") for name in method.decorator_list
    )


def instance_reads(source: str) -> Iterator[tuple[int, str]]:
    """Yield ``(line, class)`` for each method of an instance that reads a key of a config, takes one or stores one."""
    for owner in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        for method in owner.body:
            if isinstance(method, ast.AnnAssign) and "CfgNode" in ast.unparse(method.annotation):  # of a dataclass
                yield method.lineno, owner.name
            if not isinstance(method, ast.FunctionDef) or _of_the_class(method):
                continue
            taken = method.name == "__init__" and any(
                "CfgNode" in ast.unparse(argument.annotation) if argument.annotation else argument.arg in _NAMES
                for argument in (*method.args.args, *method.args.kwonlyargs)
            )
            reads = (
                isinstance(node, ast.Attribute) and node.attr.isupper() and _is_config(node.value)
                for node in ast.walk(method)
            )
            if taken or any(reads):
                yield method.lineno, owner.name


def main() -> int:
    """Print each instance that reads the config but is not an owner, and each owner that does not."""
    paths = sorted(path for pattern in ("fastamp/**/*.py", "projects/**/*.py") for path in REPOSITORY.glob(pattern))
    names = {str(path.relative_to(REPOSITORY)): path for path in paths}
    checked = {
        name: path.read_text(encoding="utf-8") for name, path in names.items() if not name.startswith(NOT_CHECKED)
    }
    found = [(name, line, owner) for name, source in checked.items() for line, owner in instance_reads(source)]
    problems = [
        f"{name}:{line}: {owner} reads the config; take plain values, and read it in from_config or a build_* function"
        for name, line, owner in found
        if owner not in OWNERS
    ]
    readers = {owner for _, _, owner in found}
    problems += [f"{owner}: listed in OWNERS, but does not read the config" for owner in sorted(OWNERS - readers)]
    print("\n".join(problems) or f"{len(readers)} classes that own a config read it, in {len(checked)} files")
    return bool(problems) or not checked


if __name__ == "__main__":
    sys.exit(main())
