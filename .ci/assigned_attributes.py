"""Check that modules assign no attributes of other modules' objects: ``python .ci/assigned_attributes.py``."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ASSIGNED = {
    # PyTorch.
    "data", "grad", "training", "momentum", "stride", "process_group", "param_groups", "state", "forward", "__class__",
    "relative_position_index", "allow_tf32", "fp32_precision", "deterministic", "benchmark",
    "_accelerator_graph_capture_health_check",
    # Standard library.
    "propagate", "prefix", "name", "loader_state", "__spec__", "daemon", "argv",
    "logging.getLogger('fastreid').parent", "logging.getLogger(name).parent",
    "entry.key", "entry.value", "options.log_severity_level", "options.intra_op_num_threads",  # ONNX
    "index.cp.spherical", "index.cp.min_points_per_centroid", "index.hnsw.efConstruction",  # faiss
    # Parsed TFLite files.
    "operator.inputs", "code.builtinCode", "code.deprecatedBuiltinCode", "operator.opcodeIndex",
    "operator.builtinOptionsType", "operator.builtinOptions", "operator.builtinOptions.beginMask",
    "operator.builtinOptions.endMask", "tensor.shapeSignature", "tensor.shape", "tensor.buffer",
    "operator.builtinOptions.newShape", "result.shape",
    "last_score", "last_train_time",  # Ray's PopulationBasedTraining
    "in_float32.is_fp32_region", "backbone.variants",  # set on functions by decorators
    "ctx.rows", "ctx.pixels", "ctx.uses_parameters", "ctx.softplus",  # torch.autograd.Function
    "hook.trainer",  # the contract of HookBase
    "args.scheduler", "args.srch_algo",  # argparse.Namespace
    # Result objects of the doctor.
    "report.images", "report.float32.cost", "report.float32.metrics", "report.cost", "report.loss_scale",
    "report.cosine", "report.zero_share", "report.layers", "report.metrics", "report.force_fp32", "report.failure",
    # Context managers that record events.
    "computing.batch", "reference.failed", "low.failed", "observer.failed",
}  # fmt: skip
"""Attributes or expressions that may be assigned outside the module of their class."""


def of_its_own(value: ast.expr) -> bool:
    """Return True if an expression is self, cls or super()."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def own_attributes(tree: ast.Module) -> set[str]:
    """Collect the attributes of the classes of a module, assigned in class bodies or to self."""
    bodies = [statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body]
    targets = [target for statement in bodies if isinstance(statement, ast.Assign) for target in statement.targets]
    targets += [statement.target for statement in bodies if isinstance(statement, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names | {node.attr for node in assigned(tree) if of_its_own(node.value)}


def assigned(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Yield the attributes that the source assigns or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def foreign_assignments(source: str) -> Iterator[str]:
    """Yield ``"line: expression"`` for each assignment to an attribute that the source does not define.

    Names in capitals are keys of the config.
    """
    tree = ast.parse(source)
    allowed = own_attributes(tree) | ASSIGNED
    for node in assigned(tree):
        expression = ast.unparse(node)
        if not (of_its_own(node.value) or node.attr.isupper() or node.attr in allowed or expression in allowed):
            yield f"{node.lineno}: {expression}"


def main() -> int:
    """Print each assignment that is not allowed, and each entry of ``ASSIGNED`` that does not occur."""
    patterns = ("fastamp/**/*.py", "tools/*.py", "projects/**/*.py")
    paths = sorted(path for pattern in patterns for path in REPOSITORY.glob(pattern))
    sources = {path.relative_to(REPOSITORY): path.read_text(encoding="utf-8") for path in paths}
    problems = [f"{path}:{place}" for path, source in sources.items() for place in foreign_assignments(source)]
    nodes = [node for source in sources.values() for node in assigned(ast.parse(source))]
    occurring = {node.attr for node in nodes} | {ast.unparse(node) for node in nodes}
    problems += [f"{name}: listed in ASSIGNED, but not assigned anywhere" for name in sorted(ASSIGNED - occurring)]
    print("\n".join(problems) or f"{len(sources)} files assign no attributes of other modules' objects")
    return bool(problems) or not sources


if __name__ == "__main__":
    sys.exit(main())
