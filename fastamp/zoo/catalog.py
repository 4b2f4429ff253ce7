"""Catalog of published weights: look up an entry by its name, and build the config of its model.

The facts in ``catalog.json`` were read from the repositories and commits that it names. No file was downloaded:
whether a file loads was concluded from source code, see ``Entry.loads``.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fastamp.config import CfgNode, read_config
from fastamp.utils.errors import ConfigError, did_you_mean

PREFIX = "zoo:"
"""Prefix of the name of an entry, where a config key or a command also accepts paths."""

_HUB_FILE = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_HOSTS = {
    "github.com": "GitHub",
    "huggingface.co": "Hugging Face",
    "drive.google.com": "Google Drive",
    "pan.baidu.com": "Baidu",
    "1drv.ms": "OneDrive",
}
# "GeM" is the pooling of the recipe, whose exponent may be fixed or learned.
_POOLING = {
    "average": "GlobalAvgPool",
    "mean of the last map": "GlobalAvgPool",
    "GeM, learned exponent": "GeneralizedMeanPoolingP",
    "GeM, learned exponent (heads.pool_layer.p is in the file)": "GeneralizedMeanPoolingP",
}
_EVAL_FEAT = {"BNNeck, feature before the neck": "before", "BNNeck, feature after the neck": "after"}
_COMMERCIAL = re.compile(r"\b(MIT|Apache-2\.0|BSD)\b")
_MAX_LISTED = 12
# Keys that change the meaning of weights without changing the shapes of their tensors.
_PIXELS = ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD")
_TEST_IMAGES = ("INPUT.SIZE_TEST", "INPUT.INTERPOLATION_TEST")
_BACKBONE = "MODEL.BACKBONE.NAME"
_STEM = ("MODEL.BACKBONE.STEM_RELU", "MODEL.BACKBONE.STEM_POOL")
_HEAD = (
    *(f"MODEL.BACKBONE.{name}" for name in ("LAST_STRIDE", "STRIDE_SIZE", "SIE_COE")),
    *(f"MODEL.HEADS.{name}" for name in ("NAME", "POOL_LAYER", "WITH_BNNECK", "EVAL_FEAT")),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Published weights file, with the facts that its model needs.

    Attributes:
        name: name in the catalog.
        program: program that published it; ``repository`` and ``commit``: where the facts were read.
        task: ``reid``; ``backbone``: pretrained weights of a backbone; or ``face``.
        rank: place among the entries to begin with; None for the others.
        url: address of the file, or of a page if ``page`` is True, from which a person downloads it.
        file: name of the published file; "" if unknown.
        size: published size in bytes; None if unknown. ``size_note``: size as others state it.
        sha256: published SHA-256, 64 hex digits; "" if none. ``hash_suffix``: its published first digits.
        mirrors: other addresses of the same file.
        license_code, license: license of the program, and of the weights; "" if not stated.
        backbone, input_size (height, width), embedding_dim, classes, neck, pooling, last_stride, strides, sie,
            non_local: facts of the model; None or "" if unknown.
        mean, std: statistics of images in 0..1; empty if unknown. ``channels``: RGB or BGR.
        interpolation: of the resize in training and in evaluation; empty if unknown.
        training_data, pretraining, paper, published: "" if unknown; the last is the date of the first link.
        withdrawn: whether the owner of the training images withdrew them.
        results: published figures in percent: ``test_set``, ``mAP``, ``rank1``, ``mINP``, ``protocol``, ``source``.
        recipe: recipe of the model; "" if there is none. ``keys``: config keys that differ from it.
        loads: whether fastamp reads the file, concluded from source code: yes, likely, unknown or no.
        layout: names of the tensors. ``note``, ``traps``: what else a user must know.
    """

    name: str
    program: str
    url: str
    task: str = "reid"
    rank: int | None = None
    repository: str = ""
    commit: str = ""
    page: bool = False
    file: str = ""
    size: int | None = None
    size_note: str = ""
    sha256: str = ""
    hash_suffix: str = ""
    mirrors: Sequence[str] = ()
    license_code: str = ""
    license: str = ""
    backbone: str = ""
    input_size: Sequence[int] = ()
    embedding_dim: int | None = None
    classes: int | None = None
    neck: str = ""
    pooling: str = ""
    last_stride: int | None = None
    strides: Sequence[int] = ()
    sie: Mapping[str, float] = field(default_factory=dict)
    non_local: bool | None = None
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    channels: str = "RGB"
    interpolation: Sequence[str] = ()
    training_data: str = ""
    pretraining: str = ""
    withdrawn: bool = False
    paper: str = ""
    published: str = ""
    results: Sequence[Mapping[str, Any]] = ()
    recipe: str = ""
    keys: Mapping[str, Any] = field(default_factory=dict)
    loads: str = "unknown"
    layout: str = ""
    note: str = ""
    traps: Sequence[str] = ()

    @property
    def host(self) -> str:
        """Name of the service that has the file, e.g. GitHub."""
        host = self.url.split("/")[2].removeprefix("www.")
        return _HOSTS.get(host, host)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the file itself; empty if there is only a web page from which a person downloads it."""
        return [*([] if self.page else [self.url]), *self.mirrors]

    @property
    def hub_file(self) -> tuple[str, str, str] | None:
        """Repository, revision and file name on the Hugging Face Hub; None for another address."""
        found = _HUB_FILE.fullmatch(self.url)
        return (found[1], found[2], found[3]) if found else None

    @property
    def commercial_use(self) -> str:
        """Commercial use, as the license of the weights states it: yes, no or not stated."""
        if re.search("non-commercial|-NC-", self.license) or any("research only" in trap for trap in self.traps):
            return "no"
        return "yes" if _COMMERCIAL.search(self.license) else "not stated"

    def model_keys(self) -> dict[str, Any]:
        """Return the config keys that differ from the recipe, and those that the facts determine: key -> value."""
        keys: dict[str, Any] = dict(self.keys)
        keys |= {"MODEL.BACKBONE.PRETRAIN": False, "MODEL.BACKBONE.PRETRAIN_PATH": ""}
        if self.mean:
            keys["MODEL.PIXEL_MEAN"] = [round(255 * value, 4) for value in self.mean]
            keys["MODEL.PIXEL_STD"] = [round(255 * value, 4) for value in self.std]
        if self.interpolation:
            training, evaluation = self.interpolation
            keys["INPUT.INTERPOLATION"] = training
            keys["INPUT.INTERPOLATION_TEST"] = "same" if training == evaluation else evaluation
        if self.input_size:
            keys["INPUT.SIZE_TRAIN"] = keys["INPUT.SIZE_TEST"] = list(self.input_size)
        facts = {
            "MODEL.HEADS.NUM_CLASSES": self.classes,
            "MODEL.HEADS.EVAL_FEAT": _EVAL_FEAT.get(self.neck),
            "MODEL.HEADS.POOL_LAYER": _POOLING.get(self.pooling),
            "MODEL.BACKBONE.LAST_STRIDE": self.last_stride,
            "MODEL.BACKBONE.STRIDE_SIZE": list(self.strides) or None,
            "MODEL.BACKBONE.WITH_NL": self.non_local,
            "MODEL.BACKBONE.SIE_CAMERAS": self.sie.get("cameras"),
            "MODEL.BACKBONE.SIE_VIEWS": self.sie.get("views"),
            "MODEL.BACKBONE.SIE_COE": self.sie.get("coefficient"),
        }
        return keys | {key: value for key, value in facts.items() if value is not None}

    def config(self) -> CfgNode:
        """Read the config of the model: the recipe with ``model_keys``; frozen.

        Raises:
            ConfigError: if there is no recipe for these weights.
        """
        if not self.recipe:
            raise ConfigError(
                f"{self.name}: fastamp has no recipe for this model ({self.note or self.layout or 'unknown layout'}).\n"
                f"  fix: choose another entry of `fastamp models`, or write a config for it and set MODEL.WEIGHTS to "
                f"{PREFIX}{self.name}"
            )
        return read_config(self.recipe, [item for pair in self.model_keys().items() for item in pair])


@cache
def list_entries() -> tuple[Entry, ...]:
    """Return all entries of the catalog, in the order of the file."""
    content = json.loads(Path(__file__).with_name("catalog.json").read_text(encoding="utf-8"))
    return tuple(_entry(dict(values), content) for values in content["entries"])


def _entry(values: dict[str, Any], content: Mapping[str, Any]) -> Entry:
    program = content["programs"].get(values["program"], {})
    for name, key in (("repository", "repository"), ("commit", "commit"), ("license_code", "license")):
        values[name] = program.get(key) or ""
    return Entry(**values | content["preprocessing"].get(values.pop("preprocessing", ""), {}))


def find(name: str) -> Entry:
    """Find an entry by its name, or by a part of the name that no other entry has.

    Args:
        name: name, with or without ``zoo:``. An end of the name, from an underscore on, has precedence over a part of
            it; upper case and hyphens are accepted.

    Raises:
        ConfigError: if no entry matches, or several do; the message lists them.
    """
    name = name.removeprefix(PREFIX)
    found = matches(name)
    if len(found) == 1:
        return found[0]
    if found:
        listed = "\n    ".join(entry.name for entry in found[:_MAX_LISTED])
        more = f"\n    and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise ConfigError(
            f"{name!r} is a part of {len(found)} names in the catalog.\n  found:\n    {listed}{more}\n"
            "  fix: give a longer part of the name"
        )
    raise ConfigError(
        f"no weights named {name!r} in the catalog.{did_you_mean(name, names())}\n  fix: choose one of `fastamp models`"
    )


def matches(name: str) -> list[Entry]:
    """Return the entry of this name, also with ``zoo:``; else all whose name ends with it; else all that contain it."""
    wanted = _normalized(name.removeprefix(PREFIX))
    if not wanted:
        return []
    by_name = {_normalized(entry.name): entry for entry in list_entries()}
    if wanted in by_name:
        return [by_name[wanted]]
    ends = [entry for key, entry in by_name.items() if key.endswith(f"_{wanted}")]
    return ends or [entry for key, entry in by_name.items() if f"_{wanted}_" in f"_{key}_"]


def differences(entry: Entry, cfg: CfgNode, *, evaluated: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return the keys by which a config changes the meaning of weights: key -> (its value, that of the entry).

    These are mean and standard deviation of the pixels and, for the same backbone, its stem. Weights of a whole
    model also have strides, a factor of the camera embeddings, a pooling and a neck. The number of classes is not
    compared, because it does not change the features.

    Args:
        entry: entry of the catalog.
        cfg: config with its weights.
        evaluated: also compare size and resize of the test images, which a training may change. Default False.
    """
    keys = [*_PIXELS, *(_TEST_IMAGES if evaluated and entry.task == "reid" else ())]
    own = _values(entry.config()) if entry.recipe else _with_resize(entry.model_keys())
    if own.get(_BACKBONE, cfg.MODEL.BACKBONE.NAME) == cfg.MODEL.BACKBONE.NAME:
        keys += [*_STEM, *(_HEAD if entry.task == "reid" else ())]
    given = _values(cfg)
    return {
        key: (given[key], own[key])
        for key in keys
        if key in own and key in given and not _is_equal(given[key], own[key])
    }


def _values(cfg: CfgNode) -> dict[str, Any]:
    return _with_resize({key.path: value for key, value in cfg.keys_below()})


def _with_resize(values: dict[str, Any]) -> dict[str, Any]:
    """Name the resize of the test images, if it is that of the training images."""
    is_same = values.get("INPUT.INTERPOLATION_TEST") == "same"
    return values | ({"INPUT.INTERPOLATION_TEST": values["INPUT.INTERPOLATION"]} if is_same else {})


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return math.isclose(one, other, abs_tol=0.01) if isinstance(one, float | int) else bool(one == other)


def names() -> list[str]:
    """Return the names of all entries."""
    return [entry.name for entry in list_entries()]


def _normalized(name: str) -> str:
    return name.strip().lower().replace("-", "_")
