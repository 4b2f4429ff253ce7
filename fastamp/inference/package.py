"""Packaged models: a folder with model.safetensors, config.yaml and a model card, to share a trained model."""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fastamp.checkpoint.checkpointer import STRIPPED
from fastamp.checkpoint.entries import checkpoint_of, damaged_entry_error, merge_from_checkpoint
from fastamp.checkpoint.evaluated_weights import evaluated_average
from fastamp.checkpoint.safetensors_file import CONFIG_NAME, WEIGHTS_NAME, write_packaged_model
from fastamp.checkpoint.strip import without_training_state
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode, get_cfg
from fastamp.config.files import FOLDERS_KEY, parse_yaml
from fastamp.config.read import split_plugins
from fastamp.inference.config_hash import feature_values
from fastamp.inference.model_card import model_card
from fastamp.inference.predictor import Predictor
from fastamp.utils.atomic_dir import temporary_folder
from fastamp.utils.errors import ConfigError, summarize_error, writing
from fastamp.utils.files import expand, file_sha256
from fastamp.utils.structure import structure_mismatch

logger = logging.getLogger(__name__)

CARD_NAME, LICENSE_NAME = "README.md", "LICENSE"
_FLOAT32 = ("SOLVER.AMP", "off", "SOLVER.AMP.EVAL_DTYPE", "float32")
# Keys of the machine that trained, besides those of its experiment trackers.
_MACHINE_KEYS = (
    *("OUTPUT_DIR", "DATALOADER.CACHE", "DATALOADER.CACHE_DIR", "DIST_TIMEOUT_MINUTES", "MODEL.WEIGHTS"),
    *("MODEL.BACKBONE.PRETRAIN_PATH", "MODEL.LORA.BASE", "MODEL.DEVICE", "LOGGERS"),
)
# Metadata of a model card -> attribute of ``License``.
_LICENSE_FIELDS = {"license": "name", "license_name": "title", "license_link": "link"}
_LOCAL_PATH = re.compile(r"(csv:|folder:)?(?:[/~]|[A-Za-z]:[/\\]).*[/\\]([^/\\]+)[/\\]?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class License:
    """License of the weights.

    Attributes:
        name: identifier on the Hub, e.g. ``apache-2.0`` or ``cc-by-nc-4.0``; ``other`` for licenses without one.
        title, link: name and URL of an ``other`` license; the link may be the file name ``LICENSE``.

    Raises:
        ConfigError: if the name is empty or not an identifier, or if title or link of an ``other`` license is missing.
    """

    name: str
    title: str = ""
    link: str = ""

    def metadata(self) -> dict[str, str]:
        """Return the fields of a model card."""
        return {field: vars(self)[name] for field, name in _LICENSE_FIELDS.items() if vars(self)[name]}

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError(
                "a license is required: others may not use weights without one.\n"
                "  fix: add --license with an identifier such as apache-2.0, cc-by-nc-4.0 or other; the licenses of "
                "the training images and of pretrained weights may restrict the choice"
            )
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.name):
            raise ConfigError(
                f"license {self.name!r}: expected an identifier of lowercase letters, digits, '.', '+' and '-'.\n"
                "  fix: use an identifier such as apache-2.0, or other with --license-name and --license-link"
            )
        if self.name == "other" and not (self.title and self.link):
            raise ConfigError(
                "license 'other' is incomplete: it requires a name and a link.\n"
                "  fix: add --license-name NAME and --license-link URL (in README.md: license_name and license_link)"
            )


@dataclass(frozen=True)
class PackagedModel:
    """Summary of a packaged model.

    Attributes:
        folder: output folder.
        bytes: size of the weights file.
        weights: kind of weights: ``model``, or the evaluated average ``ema`` or ``swa``.
        metrics: dataset name -> metrics in the model card; empty if the model has no recorded evaluation.
    """

    folder: Path
    bytes: int
    weights: str
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)


def package(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    license: License,
    repository: str = "",
    metrics: str | os.PathLike[str] | None = None,
    plugin: str = "",
) -> PackagedModel:
    """Write the evaluated weights, the config and a model card of a checkpoint to a new folder.

    The folder gives the same features as the checkpoint. Training state is removed, and local paths in the config are
    reduced to their last component.

    Args:
        source: checkpoint or run folder.
        folder: output folder; must not exist, or be empty.
        license: license of the weights.
        repository: ``user/name`` on the Hub, for the model card; "" (default) if unknown.
        metrics: ``metrics_eval.json`` of an evaluation of this checkpoint. Default: None, the evaluation that is
            recorded in the checkpoint, if there is one.
        plugin: Python file with the custom components of the model; it is named in the model card, but not packaged.

    Raises:
        ConfigError: if the folder exists, or ``metrics`` is invalid or of another model.
        WeightsError: if the checkpoint is missing or damaged, or contains no config.
        WriteError: if the folder cannot be written.
    """
    checkpoint, target = checkpoint_of(expand(source)), expand(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {target} already exists.\n  fix: choose a new folder, or delete this one")
    content = without_training_state(read_checkpoint(checkpoint), checkpoint)
    cfg = get_cfg(plugin)
    merge_from_checkpoint(cfg, content, checkpoint)
    if metrics is None:
        evaluation = _recorded_evaluation(content, checkpoint)
    else:
        evaluation = _read_evaluation(expand(metrics), checkpoint, cfg, plugin) | {"weights": content[STRIPPED]}
    config, public = _public_config(cfg), get_cfg(plugin)
    public.merge_saved(config)
    content = {name: value if name == "model" else _public(value) for name, value in content.items()}
    content |= {"config": config, "evaluation": _public(evaluation)}
    with writing(target), temporary_folder(target) as build:
        write_packaged_model(build, content)
        predictor = Predictor(build, device="cpu", opts=_FLOAT32, plugin=plugin)  # reads what was written
        text = model_card(
            repository or target.name,
            license=license.metadata(),
            content=content,
            cfg=public,
            initial_weights=_initial_weights(cfg),
            feature_dim=predictor.feature_dim,
            plugin=", ".join(Path(name).name for name in split_plugins(plugin)),
        )
        (build / CARD_NAME).write_text(text, encoding="utf-8")
        build.rename(target)
    size = (target / WEIGHTS_NAME).stat().st_size
    return PackagedModel(target, size, content[STRIPPED], content["evaluation"].get("metrics", {}))


def check_packaged(folder: Path) -> License:
    """Check that a folder is a packaged model with a license, and return the license.

    Raises:
        ConfigError: if a file is missing, or the license in README.md is missing or incomplete.
        WeightsError: if the weights are damaged.
    """
    missing = [name for name in (WEIGHTS_NAME, CONFIG_NAME, CARD_NAME) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} is not a packaged model: {', '.join(missing)} not found.\n"
            "  fix: give a run folder or checkpoint, or write the folder with `fastamp push SOURCE --to FOLDER`"
        )
    parse_yaml(read_checkpoint(folder / WEIGHTS_NAME)["config"], str(folder / CONFIG_NAME))
    text = (folder / CARD_NAME).read_text(encoding="utf-8", errors="replace")
    match = re.match(r"---\s*\n(.*?)\n---\s*\n", text, re.DOTALL)
    card = parse_yaml(match[1], f"metadata in {folder / CARD_NAME}") if match else {}
    license = License(**{name: str(card.get(field) or "") for field, name in _LICENSE_FIELDS.items()})
    if license.link == LICENSE_NAME and not (folder / LICENSE_NAME).is_file():
        raise ConfigError(
            f"the model card links to the file {LICENSE_NAME}, which is not in {folder}.\n"
            f"  fix: save the text of the license as {folder / LICENSE_NAME}"
        )
    return license


def _recorded_evaluation(content: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the evaluation that a training run recorded for the packaged weights; empty if there is none."""
    evaluation: dict[str, Any] | None = content.get("evaluation")
    if evaluation is None or evaluation == {}:
        return {}
    form: dict[str, Any] = {"weights": "", "protocol": "", "metrics": {}}
    wrong = structure_mismatch(form, evaluation, "evaluation")
    if wrong or not evaluation.keys() >= form.keys():
        raise damaged_entry_error(checkpoint, wrong or f"evaluation: expected {', '.join(form)}")
    if evaluation["weights"] != content[STRIPPED]:
        logger.warning(
            "the model card has no metrics: the run evaluated the %s weights, but the packaged weights are %s.\n"
            "  fix: evaluate %s with `fastamp eval`, and add --metrics metrics_eval.json",
            evaluation["weights"],
            content[STRIPPED],
            checkpoint,
        )
        return {}
    return evaluation


def _read_evaluation(path: Path, checkpoint: Path, cfg: CfgNode, plugin: str) -> dict[str, Any]:
    """Read ``metrics_eval.json`` of an evaluation of a checkpoint.

    Raises:
        ConfigError: if the file cannot be read, or if it is of another file or of a config with other features.
    """
    try:
        recorded = json.loads(path.read_bytes())
        digest, text = recorded["weights_sha256"], recorded["config"]
        evaluation = {"protocol": str(recorded["protocol"]), "metrics": dict(recorded["metrics"])}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"--metrics {path}: expected metrics_eval.json of this version of fastamp.\n"
            f"  found: {summarize_error(error)}\n  fix: write the file with `fastamp eval {checkpoint}`"
        ) from error
    if digest != file_sha256(checkpoint):
        raise ConfigError(
            f"--metrics {path}: these are metrics of another file, {recorded.get('weights')}.\n"
            f"  fix: evaluate {checkpoint} with `fastamp eval`"
        )
    evaluated = get_cfg(plugin)
    evaluated.merge_saved(text)
    values, expected = (
        feature_values(each) | {"weights": evaluated_average(each) or "model"} for each in (evaluated, cfg)
    )
    differ = [f"{key} {values[key]}" for key in values if values[key] != expected[key]]
    if differ:
        raise ConfigError(
            f"--metrics {path}: the evaluation used another config than the checkpoint: {', '.join(differ)}.\n"
            "  fix: evaluate without these overrides"
        )
    return evaluation


def _initial_weights(cfg: CfgNode) -> list[str]:
    """List the weights that the training started from, without folders."""
    backbone = cfg.MODEL.BACKBONE
    weights = [Path(cfg.MODEL.WEIGHTS).name] if cfg.MODEL.WEIGHTS else []
    if backbone.PRETRAIN:
        path = Path(backbone.PRETRAIN_PATH).name
        weights.append(path or "published pretrained weights of the backbone (MODEL.BACKBONE.PRETRAIN)")
    return weights


def _public_config(cfg: CfgNode) -> str:
    """Serialize a config with the defaults of the keys of the machine that trained, and shortened local paths."""
    keys = (key for key, _ in cfg.keys_below() if key.path in _MACHINE_KEYS or key.path.startswith("TRACKING."))
    values = parse_yaml(cfg.with_values({key.path: key.default for key in keys}).saved_text(), "config")
    del values[FOLDERS_KEY]
    return yaml.safe_dump(_public(values))


def _public(value: Any) -> Any:
    """Reduce absolute local paths to their last component, in the keys and strings of dicts and lists.

    >>> _public({"csv:/home/user/cameras.csv": ["Market1501"]})
    {'csv:cameras.csv': ['Market1501']}
    """
    if isinstance(value, Mapping):
        return {_public(name): _public(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_public(member) for member in value]
    return _LOCAL_PATH.sub(r"\1\2", value) if isinstance(value, str) and _LOCAL_PATH.fullmatch(value) else value
