"""Model card of a packaged model: README.md with the metadata that the Hugging Face Hub reads."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fastamp.checkpoint.checkpointer import STRIPPED
from fastamp.checkpoint.entries import is_training_recorded
from fastamp.config import CfgNode
from fastamp.config.changes import changed_values
from fastamp.evaluation import PROTOCOL_REGISTRY, Protocol
from fastamp.evaluation.calibration import read_calibration
from fastamp.utils.version import __version__

_TEMPLATES = Path(__file__).parent / "templates"
_TASK = "image-feature-extraction"  # the Hub's name of the task


def model_card(
    name: str,
    *,
    license: Mapping[str, str],
    content: Mapping[str, Any],
    cfg: CfgNode,
    initial_weights: Sequence[str],
    feature_dim: int,
    plugin: str = "",
) -> str:
    """Write the text of a model card.

    All facts are from the config and from entries of the checkpoint. The model card states which facts are missing.

    Args:
        name: ``user/name`` on the Hub, or the name of a folder.
        license: metadata fields of the license.
        content: content of the packaged model, see ``write_packaged_model``.
        cfg: config of the packaged model.
        initial_weights: weights that the training started from; may be empty.
        feature_dim: dimension of the features.
        plugin: file name of the plugin that the model needs; "" (default) for none.
    """
    entries = {
        name: entry if isinstance(entry := content.get(name), Mapping) else {}
        for name in ("evaluation", "policy", "versions", "best")
    }
    is_recorded = is_training_recorded(content)
    results = {  # without the entry metric, which is the mean of mAP and Rank-1
        dataset: {name: value for name, value in metrics.items() if isinstance(value, float) and name != "metric"}
        for dataset, metrics in entries["evaluation"].get("metrics", {}).items()
        if isinstance(metrics, Mapping)
    }
    columns = list(dict.fromkeys(metric for metrics in results.values() for metric in metrics))
    metadata = _metadata(name, license, results, columns)
    datasets = (*(cfg.DATASETS.NAMES if is_recorded else ()), *(results or cfg.DATASETS.TESTS))
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["code"] = _code
    return environment.get_template("model_card.md").render(
        **entries,
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000),
        name=name,
        title=" ".join(name.rpartition("/")[2].split()),
        license=license,
        cfg=cfg,
        parameters=sum(tensor.numel() for tensor in content["model"].values() if tensor.is_floating_point()),
        dtypes=sorted({str(tensor.dtype).removeprefix("torch.") for tensor in content["model"].values()}),
        feature_dim=feature_dim,
        weights=content[STRIPPED],
        is_recorded=is_recorded,
        initial_weights=initial_weights,
        recipe=yaml.safe_dump(changed_values(cfg), sort_keys=True, allow_unicode=True, width=1000).rstrip(),
        results=results,
        columns=columns,
        protocol_text=_describe_protocol(cfg),
        calibration=read_calibration(content, name),
        version=__version__,
        torch_version=torch.__version__,
        plugin=plugin,
        evaluate=_evaluation_command(name, results, plugin),
        is_withdrawn=any("duke" in dataset.lower() for dataset in datasets),
    )


def _evaluation_command(name: str, datasets: Iterable[str], plugin: str) -> str:
    """Return the command that computes the metrics of a packaged model; its config has the other settings."""
    source = f"hf://{name}" if "/" in name else name
    tests = json.dumps([*datasets])  # its quotes need no escapes in a shell
    words = ["fastamp", "eval", source, "DATASETS.TESTS", tests, "OUTPUT_DIR", "evaluation"]
    return shlex.join([*words, *(("--plugin", plugin) if plugin else ())])


def _describe_protocol(cfg: CfgNode) -> str:
    """Describe the protocol as in the log; "" for the protocol of a project that is not loaded."""
    if cfg.TEST.PROTOCOL not in PROTOCOL_REGISTRY:
        return ""
    return f"Protocol: {Protocol.from_config(cfg).rule.describe()}."


def _metadata(
    name: str, license: Mapping[str, str], results: Mapping[str, Mapping[str, float]], columns: list[str]
) -> dict[str, Any]:
    """Return the metadata of the model card; ``model-index`` holds the results that the Hub shows."""
    metadata = {
        **license,
        "library_name": "fastamp",
        "pipeline_tag": _TASK,
        "tags": ["fastamp", "re-identification", "image-retrieval", "pytorch"],
    }
    shown = [
        {
            "task": {"type": _TASK, "name": "Re-identification"},
            "dataset": {"type": dataset, "name": dataset},
            "metrics": [{"type": metric, "value": round(value, 4)} for metric, value in metrics.items()],
        }
        for dataset, metrics in results.items()
        if metrics
    ]
    model = {"name": name.rpartition("/")[2], "results": shown}
    return metadata | ({"metrics": columns, "model-index": [model]} if shown else {})


def _code(value: Any) -> str:
    """Format a value as inline code that cannot end the code, the line or the table cell."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", "\\|")
    return f"`{text}`"
