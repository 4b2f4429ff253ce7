"""Reference of the Python API: the public names of each package, rendered by mkdocstrings from their docstrings."""

import ast
from pathlib import Path

from markdown_text import table

ROOT = Path(__file__).parents[2]


def _with_modules(package: str) -> list[str]:
    """Return a package and its modules."""
    paths = sorted((ROOT / "fastamp" / package.replace(".", "/")).rglob("[!_]*.py"))
    return [package, *(".".join(path.relative_to(ROOT / "fastamp").with_suffix("").parts) for path in paths)]


# Package -> (summary, modules). The public names of a module are those in its ``__all__``, else all its functions and
# classes without a leading underscore.
PACKAGES = {
    "config": ("config tree, YAML files and config keys", ["config"]),
    "data": (
        "datasets, samplers, transforms and loaders",
        ["data", *_with_modules("data.datasets"), *_with_modules("data.transforms"), "data.samplers"],
    ),
    "modeling": (
        "backbones, heads, losses and meta-architectures",
        [
            "modeling",
            *_with_modules("modeling.backbones"),
            "modeling.heads",
            *_with_modules("modeling.losses"),
            "modeling.meta_arch",
        ],
    ),
    "layers": (
        "pooling, norms, classifiers and distances",
        ["layers", "layers.pooling", "layers.norm", "layers.classifier", "layers.attention"],
    ),
    "solver": ("optimizers, schedules and weight averages", ["solver"]),
    "amp": ("precision policy, loss scaling and the optimizer step", ["amp"]),
    "evaluation": (
        "metrics, protocols, ranking and re-ranking",
        [
            "evaluation",
            "evaluation.protocol",
            "evaluation.ranking_rule",
            "evaluation.rerank",
            "evaluation.query_expansion",
        ],
    ),
    "engine": ("training loop, hooks and trainers", ["engine", "engine.hooks"]),
    "inference": (
        "feature extraction, search, comparison and export with a trained model",
        [
            "inference",
            *(
                f"inference.{name}"
                for name in ("extract", "image_folder", "gallery_source", "similarity", "export", "runtime", "hub")
            ),
        ],
    ),
    "retrieval": (
        "features with their columns, and galleries",
        [
            "retrieval",
            *(
                f"retrieval.{name}"
                for name in (
                    "search",
                    "features",
                    "columns",
                    "model_id",
                    "features_file",
                    "gallery",
                    "open_gallery",
                    "mutable_gallery",
                    "indices",
                )
            ),
            "retrieval.gallery_store",
        ],
    ),
    "integrations": ("adapters for the trackers of BoxMOT and Ultralytics", ["integrations"]),
    "tracking": ("tracking of detections, and its metrics", ["tracking", "tracking.track", "tracking.frames"]),
    "report": ("report.html", ["report"]),
    "checkpoint": ("reading and writing of weights", ["checkpoint"]),
    "fastreid": (
        "names of FastReID's Python API",
        _with_modules("fastreid")[1:],
    ),
}


def api_pages() -> dict[str, str]:
    """Return path below ``docs/`` -> Markdown of the pages of the Python API."""
    rows = [(f"[fastamp.{name}]({name}.md)", summary) for name, (summary, _) in PACKAGES.items()]
    index = f"""# Python API

After this page you can find the public classes and functions of each package. `fastamp.Predictor` is
[`fastamp.inference.Predictor`](inference.md#fastamp.inference.Predictor), and `fastamp.from_pretrained` is
[`fastamp.inference.hub.from_pretrained`](inference.md#fastamp.inference.hub.from_pretrained).

{table(("package", "content"), rows)}"""
    pages = {"reference/api/index.md": index}
    for name, (summary, modules) in PACKAGES.items():
        parts = [f"# fastamp.{name}\n\nAfter this page you can use the {summary}, from Python.\n"]
        listed: set[str] = set()
        for module in modules:
            names = [name for name in public_names(module) if name not in listed]
            listed |= set(names)
            if module != name and names:
                parts.append(f"## fastamp.{module}\n")
            parts += [f"::: fastamp.{module}.{name}\n" for name in names]
        pages[f"reference/api/{name}.md"] = "\n".join(parts)
    return pages


def public_names(module: str) -> list[str]:
    """Return the public names of a module of fastamp that can be found without importing it."""
    path = ROOT / "fastamp" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined, bound, listed = [], set(), None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.append(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastamp"):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bound.add(node.targets[0].id)
            if node.targets[0].id == "__all__" and isinstance(node.value, ast.List):
                listed = [entry.value for entry in node.value.elts if isinstance(entry, ast.Constant)]
    if listed is None:
        return [name for name in defined if not name.startswith("_")]
    return sorted((name for name in listed if name in bound or name in defined), key=str.lower)
