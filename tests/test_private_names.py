"""Static check: modules use no private attributes of other modules' objects, and assign none of their attributes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fastamp"
ALLOWED = {
    # PyTorch, without a public name.
    "_BatchNorm", "_InstanceNorm", "_ConvNd", "_C", "_to_copy", "_buffers", "_modules", "_parameters", "_apply",
    "_version", "_compiled_call_impl", "_set_params_and_buffers_to_ignore_for_model",
    "_accelerator_graph_capture_health_check",
    "_foreach_copy_", "_foreach_norm", "_foreach_mul_", "_foreach_sub", "_foreach_lerp_", "_foreach_clamp_min_",
    "_foreach_clamp_max_", "_upsample_bicubic2d_aa",
    # Standard library: namedtuple._replace and os._exit.
    "_replace", "_exit",
    "_actions",  # argparse.ArgumentParser
    "_pos_embed",  # timm
    "_bit_generator",  # NumPy's RandomState
}  # fmt: skip

ASSIGNED = {
    # PyTorch.
    "data", "grad", "training", "momentum", "stride", "process_group", "param_groups", "state", "forward", "__class__",
    "relative_position_index", "allow_tf32", "fp32_precision", "deterministic", "benchmark",
    "_accelerator_graph_capture_health_check",
    # Standard library.
    "propagate", "prefix", "name", "loader_state", "__spec__", "__init__", "daemon", "argv",
    "logging.getLogger(other).parent",
    "entry.key", "entry.value", "dim.dim_param", "options.log_severity_level", "options.intra_op_num_threads",  # ONNX
    "index.cp.spherical", "index.cp.min_points_per_centroid", "index.hnsw.efConstruction",  # faiss
    # Parsed TFLite files.
    "operator.inputs", "code.builtinCode", "code.deprecatedBuiltinCode", "operator.opcodeIndex",
    "operator.builtinOptionsType", "operator.builtinOptions", "operator.builtinOptions.beginMask",
    "operator.builtinOptions.endMask", "tensor.shapeSignature", "tensor.shape", "tensor.buffer",
    "operator.builtinOptions.newShape", "result.shape",
    "last_score", "last_train_time",  # Ray's PopulationBasedTraining
    "in_float32.is_fp32_region", "backbone.variants",  # set on functions by decorators
    "ctx.rows", "ctx.pixels", "ctx.uses_parameters",  # torch.autograd.Function
    "hook.trainer",  # the contract of HookBase
    "args.scheduler", "args.srch_algo",  # argparse.Namespace
    # Result objects of the doctor.
    "report.images", "report.float32.cost", "report.float32.metrics", "found.cost", "found.loss_scale",
    "found.cosine", "found.zero_share", "found.layers", "found.metrics", "found.force_fp32", "found.failure",
    # Context managers that record events.
    "computing.batch", "reference.failed", "low.failed", "observer.failed",
}  # fmt: skip
"""Attributes or expressions that may be assigned outside the module of their class."""


def defined(tree: ast.Module) -> set[str]:
    """Collect the private names defined in a module: functions, methods, classes, variables, attributes of self."""
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
    """Return True if an expression is self, cls or super()."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign(source: str) -> Iterator[str]:
    """Yield ``"line: expression"`` for each private attribute that the source does not define."""
    tree = ast.parse(source)
    own = defined(tree) | ALLOWED
    for node in ast.walk(tree):
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        if is_private and not of_its_own(node.value) and node.attr not in own:
            yield f"{node.lineno}: {ast.unparse(node)}"


def own_attributes(tree: ast.Module) -> set[str]:
    """Collect the attributes of the classes of a module, assigned in class bodies or to self."""
    bodies = [statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body]
    targets = [target for each in bodies if isinstance(each, ast.Assign) for target in each.targets]
    targets += [each.target for each in bodies if isinstance(each, ast.AnnAssign)]
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
    own = own_attributes(tree) | ASSIGNED
    for node in assigned(tree):
        expression = ast.unparse(node)
        if not (of_its_own(node.value) or node.attr.isupper() or node.attr in own or expression in own):
            yield f"{node.lineno}: {expression}"


def test_sources_do_not_assign_attributes_of_other_modules():
    root = PACKAGE.parent
    paths = [*PACKAGE.rglob("*.py"), *(root / "tools").glob("*.py"), *(root / "projects").rglob("*.py")]
    found = [
        f"{path.relative_to(root)}:{each}"
        for path in sorted(paths)
        for each in foreign_assignments(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source, expected",
    [
        ("loader.start_iter = 4", ["1: loader.start_iter"]),
        ("def f(self):\n    self.model.preprocess = g", ["2: self.model.preprocess"]),
        ("for hook.period, x in pairs:\n    del x.store", ["1: hook.period", "2: x.store"]),
        ("a.total += 1", ["1: a.total"]),
        ("class A:\n    size: int\n    def f(self):\n        self.b = 1\ndef g(a):\n    a.size = a.b = 2", []),
        ("cfg.MODEL.DEVICE = 'cpu'", []),
    ],
)
def test_foreign_assignment_check_finds_planted_assignments(source, expected):
    """Negative control for test_sources_do_not_assign_attributes_of_other_modules."""
    assert list(foreign_assignments(source)) == expected


def test_sources_do_not_use_private_attributes_of_other_modules():
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
def test_private_attribute_check_finds_planted_attributes(source, expected):
    """Negative control for test_sources_do_not_use_private_attributes_of_other_modules."""
    assert list(foreign(source)) == expected


def test_every_allowed_private_name_is_used_in_the_sources():
    used = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert ALLOWED - used == set()


def test_every_allowed_foreign_assignment_occurs_in_the_sources():
    root = PACKAGE.parent
    paths = [*PACKAGE.rglob("*.py"), *(root / "projects").rglob("*.py")]
    nodes = [node for path in paths for node in assigned(ast.parse(path.read_text(encoding="utf-8")))]
    assert ASSIGNED - {node.attr for node in nodes} - {ast.unparse(node) for node in nodes} == set()
