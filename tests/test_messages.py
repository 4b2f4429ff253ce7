"""Every error for users and every warning names a value or config key, has a fix, and follows the glossary."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from glossary import text_rules

REPOSITORY = Path(__file__).resolve().parents[1]
# An interpolated value (also of %-formatting), an option, a config key, an argument, or a package.
NAMED = re.compile(r"\0|%[.\d]*[sdrgf]|(?<![\w-])--[a-z]|\b[A-Z][A-Z0-9]*[._][A-Z]|\b[a-z]+_[a-z]+\b|not installed")
FIX = re.compile(r"fix:|choices:")  # an unknown name is fixed by one of the choices
WARNINGS = ("logger.warning", "warnings.warn")

# Reason -> lines "module function function ..." of the messages that need no fix, or whose fix stands elsewhere.
EXEMPT = {
    "the caller adds the file, the line and the fix": """
        fastamp.checkpoint.pickle_limits add check_pickle
        fastamp.data.datasets.csv_table _check_line _parse_box
        fastamp.data.datasets.filename_dataset find_columns
        fastamp.data.decode _content _pil_errors box_inside decode_image
        fastamp.diagnostics.smoke_train _loss
        fastamp.inference.export.calibration_images load_calibration_images""",
    "the text comes from another function, object or process": """
        fastamp.amp.module_monitor _report
        fastamp.diagnostics.precision_diagnostics before_first_step
        fastamp.inference.model_comparison compare_models""",
    "the run or command continues as it should, and there is nothing to change": """
        fastamp.amp.policy _warn_once
        fastamp.amp.step skip
        fastamp.checkpoint.checkpointer _newest_readable
        fastamp.checkpoint.load_state _log_mismatches
        fastamp.checkpoint.record add_to_record
        fastamp.engine.hooks.signals _receive
        fastamp.inference.calibration write_calibrated
        fastamp.retrieval.mutable_gallery build_candidates
        fastamp.inference.hub upload
        fastamp.modeling.infer_config _candidates
        fastamp.solver.state_layout _warn_not_validated""",
    "an error is raised next, and has the fix": """
        fastamp.engine.hooks.evaluation after_epoch
        fastamp.engine.trainer_base _notify_error""",
    "a check of fastamp itself has failed: a result, not a mistake of the user": """
        projects.PlantedOverflow.compare main
        tools.benchmark.gpu demo run_tests
        tools.soak fill_disk wait""",
}


class Module:
    """Calls in a file, and the expressions that its names stand for: (function, name) -> expressions."""

    def __init__(self, source: str) -> None:
        self.names: dict[tuple[str, str], list[ast.AST]] = defaultdict(list)
        self.calls: list[tuple[str, ast.Call]] = []
        self.bases: dict[str, set[str]] = {}
        self.origins: dict[str, str] = {}  # imported name -> module
        self._visit(ast.parse(source), "")

    def _visit(self, parent: ast.AST, scope: str) -> None:
        for node in ast.iter_child_nodes(parent):
            match node:
                case ast.Return(value=ast.expr() as value):
                    self.names["", scope].append(value)
                case ast.ClassDef(name=name, bases=bases):
                    self.bases[name] = {ast.unparse(base).split(".")[-1] for base in bases}
                case ast.ImportFrom(module=str(origin), names=names):
                    self.origins |= {alias.asname or alias.name: origin for alias in names}
                case ast.ExceptHandler(name=str(name), type=ast.expr() as kind):
                    self.names[scope, name].append(kind)
                case ast.Call():
                    self.calls.append((scope, node))
            for target in getattr(node, "targets", [getattr(node, "target", None)]):
                for part in getattr(target, "elts", [target]) if target else []:
                    self.names[scope, ast.unparse(part)].append(getattr(node, "iter", getattr(node, "value", None)))
            self._visit(node, node.name if isinstance(node, ast.FunctionDef) else scope)


def read_messages(sources: dict[str, str]) -> dict[tuple[str, int], str]:
    """Return ("module function", line) -> text of each error for users and each warning in ``{module: source}``.

    The text has all strings of the expression, and of the names and functions in it; "\\0" stands for other values.
    """
    modules = {name: Module(source) for name, source in sources.items()}
    bases = {name: names for module in modules.values() for name, names in module.bases.items()}
    errors = {"UserError"}
    while more := {name for name, names in bases.items() if names & errors} - errors:
        errors |= more

    def read(module: str, scope: str, node: ast.AST | None, seen: set[tuple[str, str, str]]) -> str:
        text = ""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in errors:
                return "\0fix:"  # of a caught error, whose message is checked where it is raised
            case ast.Name(id=name) | ast.Call(func=ast.Attribute(attr=name)):
                inner = scope if (scope, name) in modules[module].names else ""
                origin = modules[module].origins.get(name, module)
                if (origin, inner, name) not in seen and origin in modules:
                    seen.add((origin, inner, name))
                    values = modules[origin].names.get((inner, name), [])
                    text = "".join(read(origin, inner or name, value, seen) for value in values)
        is_value = isinstance(node, (ast.Name, ast.FormattedValue))
        children = ast.iter_child_nodes(node) if node else ()
        return "\0" * is_value + text + "".join(read(module, scope, child, seen) for child in children)

    return {
        (f"{name} {scope}", call.lineno): "".join(read(name, scope, value, set()) for value in call.args)
        for name, module in modules.items()
        for scope, call in module.calls
        if call.args and (ast.unparse(call.func) in WARNINGS or ast.unparse(call.func).split(".")[-1] in errors)
    }


def find_problems(messages: dict[tuple[str, int], str]) -> dict[str, list[str]]:
    """Return "module function" -> problems of its messages."""
    problems, rules = defaultdict(list), text_rules()
    for (place, line), text in messages.items():
        wrong = [rule for pattern, rule in rules if pattern.search(text)]
        wrong += ["has no fix"] * (not FIX.search(text)) + ["names no value or key"] * (not NAMED.search(text))
        problems[place] += [f"line {line}: {rule}: {text!r:.200}" for rule in wrong]
    return {place: found for place, found in problems.items() if found}


def test_messages_have_a_value_and_a_fix_and_follow_the_glossary():
    files = [file for folder in ("fastamp", "projects", "tools") for file in (REPOSITORY / folder).rglob("*.py")]
    names = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for file in files]
    messages = read_messages({name: file.read_text("utf-8") for name, file in zip(names, files, strict=True)})
    assert len(messages) > 900
    lines = [line.split() for text in EXEMPT.values() for line in text.strip().splitlines()]
    found, exempt = find_problems(messages), {f"{module} {name}" for module, *names in lines for name in names}
    assert not [
        f"{place} {problem}" for place, problems in found.items() if place not in exempt for problem in problems
    ]
    assert not exempt - found.keys(), "these functions need no exception"


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("raise OddError(f'{x} is wrong')", "has no fix"),
        ("raise OddError(describe(x))", "has no fix"),
        ("logger.warning('%s is ignored', x)", "has no fix"),
        ("raise OddError('it is wrong; fix: change it')", "names no value or key"),
        ("raise OddError(f'{x} is trained `afresh`; fix: change it')", "afresh"),
    ],
)
def test_planted_message_without_value_or_fix_is_found(statement, problem):
    good = "raise OddError(describe(x) + FIX)\n    raise OddError('SOLVER.OPT is odd; fix: change it')"
    source = "FIX = 'fix: change it'\nclass OddError(UserError): ...\ndef describe(x):\n    return f'{x} is odd'\n"
    found = find_problems(read_messages({"m": f"{source}def check(x):\n    {good}\ndef bad(x):\n    {statement}\n"}))
    assert [*found] == ["m bad"] and problem in found["m bad"][0]
