"""Translation of config files from FastReID v0.1.1 and v1.0.0 to the current keys.

The defaults of the release and the file are translated together, because some keys depend on others; for example, the
margin of a ``linear`` classifier was not used.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastamp.config.defaults import KEYS
from fastamp.config.key import Key, convert, parse_bool, show_value
from fastamp.config.releases.tables import (
    FIRST_VALUES,
    OLD_KEYS,
    RELEASE_DEFAULTS,
    RENAMED,
    SPELLINGS,
    VALUES,
)
from fastamp.utils.errors import ConfigError, did_you_mean

Layers = list[tuple[str, dict[str, Any]]]

_ALL_OLD = {key for defaults in RELEASE_DEFAULTS.values() for key in defaults}
_FIRST_ONLY = set(RELEASE_DEFAULTS["v0.1.1"]) - set(RELEASE_DEFAULTS["v1.0.0"])
_LAST_ONLY = set(RELEASE_DEFAULTS["v1.0.0"]) - set(RELEASE_DEFAULTS["v0.1.1"])
_TYPES = {RENAMED.get(key, key): value for defaults in RELEASE_DEFAULTS.values() for key, value in defaults.items()}
# Loss -> section of its keys, and the number of these losses in MGN.
_MGN_LOSSES = {
    "CrossEntropyLoss": ("CE", 8),
    "FocalLoss": ("FL", 8),
    "TripletLoss": ("TRI", 5),
    "CircleLoss": ("CIRCLE", 5),
}


def detect(layers: Layers, known: set[str]) -> tuple[str, list[str]]:
    """Detect the FastReID release that config files were written for.

    Args:
        layers: ``(source, mapping with dotted keys)`` of each file.
        known: paths of the current keys.

    Returns:
        ``(release, lines)``: the release, or "" if all keys are current, and log lines with the reasons.

    Raises:
        ConfigError: if one file sets keys that exist only in an old release, and another sets keys that exist only in
            the current version.
    """
    old_keys = OLD_KEYS.keys() - known  # a project may declare a key of such a name
    old = {source: _old_marks(mapping, old_keys) for source, mapping in layers}
    current = {source: _current_marks(mapping, known) for source, mapping in layers}
    # Values are not sufficient: a custom head, for example, may also be named LinearHead.
    if not any(key in old_keys for _, mapping in layers for key in mapping):
        return "", []
    of_old = next(source for source, marks in old.items() if marks)
    of_new = next((source for source, keys in current.items() if keys and not old[source]), None)
    if of_new:
        raise ConfigError(
            f"{of_old} and {of_new} cannot be merged: the first sets keys of an old FastReID release "
            f"({_first_few(old[of_old])}), the second sets current keys ({_first_few(current[of_new])}).\n"
            "  fix: set _BASE_ to a base file of the same release (configs/Base-*.yml at its Git tag), or translate "
            "the old file with `fastamp config convert` first"
        )
    given = {key for _, mapping in layers for key in mapping}
    by_value = [f"{key} {mapping[key]}" for _, mapping in layers for key in FIRST_VALUES if _is_old_value(mapping, key)]
    first = [*sorted(given & _FIRST_ONLY, key=lambda key: (key in KEYS, key)), *dict.fromkeys(by_value)]
    last = sorted(given & _LAST_ONLY, key=lambda key: (key in KEYS, key))
    release, reasons = ("v0.1.1", first) if len(first) > len(last) else ("v1.0.0", last)
    lines = [f"detected a config of FastReID {release}, because it sets {_first_few(reasons)}"]
    if not reasons:
        marks = [mark for texts in old.values() for mark in texts]
        lines = [
            f"detected a config of FastReID v0.1.1 or v1.0.0, because it sets {_first_few(marks)}; read as "
            "v1.0.0 (for v0.1.1, run `fastamp config convert --release v0.1.1`)"
        ]
    elif first and last:
        others = last if release == "v0.1.1" else first
        lines.append(f"FastReID {release} lacks {_first_few(others)}; translated as keys of the other release")
    if both := [key for keys in current.values() for key in keys]:
        lines.append(f"no old release of FastReID has {_first_few(both)}; read as current keys")
    return release, lines


def _old_marks(mapping: Mapping[str, Any], old_keys: set[str]) -> list[str]:
    """List the keys and values that exist only in old releases."""
    keys = [key for key in mapping if key in old_keys]
    return keys + [f"{key} {mapping[key]}" for key in VALUES if _is_old_value(mapping, key)]


def _current_marks(mapping: Mapping[str, Any], known: set[str]) -> list[str]:
    """List the keys that exist in no old release."""
    return [key for key in mapping if key not in _ALL_OLD and key not in SPELLINGS and _is_known(key, known)]


def _is_old_value(mapping: Mapping[str, Any], key: str) -> bool:
    value = mapping.get(key)
    return isinstance(value, str) and value in VALUES[key]


def _is_known(key: str, known: set[str]) -> bool:
    """Return True for a current key, a key of a free-form section, or a section that can be set to a single value."""
    key = SPELLINGS.get(key, key)
    if key in known or f"{key}.ENABLED" in known:
        return True
    return any(KEYS[parent].is_free_form for parent in _parents(key) if parent in KEYS)


def _parents(key: str) -> list[str]:
    return [key[:dot] for dot, letter in enumerate(key) if letter == "."]


def flat(mapping: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the dotted key and value of each leaf; a free-form section is one value.

    INPUT.PADDING is a number of pixels in an old file, and a bool that sets INPUT.PADDING.ENABLED in a current file.
    """
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if f"{path}.ENABLED" in KEYS and parse_bool(value) is not None:
            path = f"{path}.ENABLED"
        free_form = path in KEYS and KEYS[path].is_free_form
        if isinstance(value, Mapping) and not free_form:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def _first_few(marks: list[str]) -> str:
    """Join the first five names with commas."""
    return ", ".join(marks[:5]) + (", ..." if len(marks) > 5 else "")


@dataclass(frozen=True)
class _Setting:
    name: str  # old name of the key
    value: Any
    source: str  # file; "" for the release's default


class Translation:
    """Translation of an old release's files to the current keys.

    Args:
        release: release whose defaults and rules apply.
        layers: ``(source, mapping with dotted keys)`` of each file.
        known: paths of the current keys.

    Attributes:
        new: current key -> value.
        lines: one log line per translated key.
        missing: one line per key without a counterpart.
    """

    def __init__(self, release: str, layers: Layers, known: set[str]) -> None:
        self.release = release
        self.new: dict[str, Any] = {}
        self.lines: list[str] = []
        self.missing: list[str] = []
        self._settings: dict[str, _Setting] = {}
        self._translated: set[str] = set()
        for name, value in RELEASE_DEFAULTS[release].items():
            self._read(name, value, "")
        for source, mapping in layers:
            for name, value in mapping.items():
                if name in OLD_KEYS or name in _ALL_OLD or _is_known(name, known):
                    self._read(name, value, source)
                else:
                    hint = did_you_mean(name, [*known, *_ALL_OLD])
                    self.missing.append(f"{_file(source)}: {name} {show_value(value)}: not a key of any release.{hint}")
        self._schedule()
        self._model()
        self._input()
        for key in self._settings:
            # A default device is not set, see ``requested_device``.
            if key not in self._translated and not (key == "MODEL.DEVICE" and not self._settings[key].source):
                self._put({key: self[key]}, key)

    def __getitem__(self, key: str) -> Any:
        setting = self._settings.get(key)
        return setting.value if setting else None

    def _read(self, name: str, value: Any, source: str) -> None:
        key = RENAMED.get(name, name)
        if key in _TYPES:
            try:
                value = convert(Key(name, _TYPES[key], ""), value)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        self._settings[key] = _Setting(name, value, source)

    def _put(self, values: Mapping[str, Any], *keys: str, why: str = "") -> None:
        """Translate the old ``keys`` to ``values`` of current keys, and log the change, if any."""
        self.new |= values
        self._translated |= set(keys)
        settings = [self._settings[key] for key in keys if key in self._settings]
        before, after = _listed((setting.name, setting.value) for setting in settings), _listed(values.items())
        sources = list(dict.fromkeys(_file(setting.source) for setting in settings if setting.source))
        differs = any(
            show_value(value) != show_value(KEYS[key].default) for key, value in values.items() if key in KEYS
        )
        why = f" ({why})" if why else ""
        if sources and before != after:
            self.lines.append(f"{', '.join(sources)}: {before} -> {after}{why}")
        elif not sources and differs:
            arrow = f"{before} -> {after}" if settings and before != after else after
            self.lines.append(f"{'default' if settings else 'rule'} of {self.release}: {arrow}{why}")

    def _drop(self, *keys: str, why: str, has_effect: bool = True) -> None:
        """Discard the old ``keys``, and log those that are set in a file."""
        self._translated |= set(keys)
        for setting in (self._settings[key] for key in keys if key in self._settings):
            if setting.source:
                lines = self.missing if has_effect else self.lines
                lines.append(f"{_file(setting.source)}: {setting.name} {show_value(setting.value)}: {why}")

    def _schedule(self) -> None:
        """Translate the learning-rate schedule, durations, and the periods of checkpoints and evaluations."""
        first, warmup = self.release == "v0.1.1", self._settings["SOLVER.WARMUP_EPOCHS"]
        if not first and warmup.name == "SOLVER.WARMUP_ITERS" and warmup.value > self["SOLVER.MAX_EPOCH"]:
            # Releases after v1.0.0 still had old keys, but the current schedule.
            values = {"SOLVER.WARMUP_ITERS": warmup.value, "SOLVER.WARMUP_EPOCHS": 0}
            self._put(
                values, "SOLVER.WARMUP_EPOCHS", why="more than all epochs, so it counts iterations, as after v1.0.0"
            )
        else:
            rule = {"SOLVER.EPOCH_SCHEDULE": "after_warmup", "SOLVER.LR_UPDATE": "epoch"}
            why = "the learning rate changed once per epoch; epochs counted from the end of the warm-up"
            if first:
                rule = {"SOLVER.EPOCH_SCHEDULE": "absolute", "SOLVER.LR_UPDATE": "iteration"}
                why = "the learning rate changed at each iteration; epochs counted from the start"
            self._put(rule | {"SOLVER.WARMUP_ITERS": 0}, why=why)
        self._put({"SOLVER.SCHED": _value("SOLVER.SCHED", self["SOLVER.SCHED"])}, "SOLVER.SCHED")
        decay = self["SOLVER.WEIGHT_DECAY"]
        if self["SOLVER.WEIGHT_DECAY_NORM"] is None:
            self._put({"SOLVER.WEIGHT_DECAY": decay, "SOLVER.WEIGHT_DECAY_NORM": decay}, "SOLVER.WEIGHT_DECAY")
        if first and self["SOLVER.FREEZE_EPOCHS"] is None:
            epochs = {"SOLVER.FREEZE_EPOCHS": self["SOLVER.FREEZE_ITERS"], "SOLVER.FREEZE_ITERS": 0}
            self._put(epochs, "SOLVER.FREEZE_ITERS", why="counted in epochs in this release")
        layers = tuple(name for name in self["MODEL.FREEZE_LAYERS"] if name)
        self._put({"MODEL.FREEZE_LAYERS": layers}, "MODEL.FREEZE_LAYERS")
        for period in ("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD"):
            if self[period] < 1:
                self._put({period: self["SOLVER.MAX_EPOCH"]}, period, why="0 meant only at the end")
        if self["SOLVER.NESTEROV"] and not self["SOLVER.MOMENTUM"]:
            self._put({"SOLVER.NESTEROV": False}, "SOLVER.NESTEROV", why="no effect without momentum")
        self._average(self["SOLVER.MAX_EPOCH"])

    def _average(self, epochs: int) -> None:
        """Translate stochastic weight averaging, which v0.1.1 ran in additional epochs after the training."""
        keys = [f"SOLVER.SWA.{name}" for name in ("ITER", "PERIOD", "LR_FACTOR", "ETA_MIN_LR", "LR_SCHED")]
        iterations, period, _, _, cyclic = (self[key] for key in keys)
        if iterations is None:  # not in v1.0.0
            return
        if not self["SOLVER.SWA.ENABLED"]:
            self._drop(*keys, why="no effect, because SOLVER.SWA.ENABLED is False", has_effect=False)
            return
        lengths = {"SOLVER.MAX_EPOCH": epochs + iterations, "SOLVER.SWA.START_EPOCH": epochs}
        self._put(lengths, "SOLVER.MAX_EPOCH", "SOLVER.SWA.ITER", why="averaging started after MAX_ITER epochs")
        self._put({"SOLVER.SWA.PERIOD": period or 1}, "SOLVER.SWA.PERIOD")
        if cyclic:
            self._drop(*keys[2:], why="no counterpart: cyclic cosine learning rate during averaging")
        self._drop(*keys[2:], why="no effect, because SOLVER.SWA.LR_SCHED is False", has_effect=False)
        self.new["SOLVER.SWA.LR_FACTOR"] = 0.0
        if "Cosine" in self["SOLVER.SCHED"]:
            self.missing.append(
                f"SOLVER.SCHED {self['SOLVER.SCHED']} with SOLVER.SWA: the cosine ended at the start of averaging; "
                "now it ends with the training"
            )

    def _model(self) -> None:
        """Translate backbone, head and losses."""
        first, mgn = self.release == "v0.1.1", self["MODEL.META_ARCHITECTURE"] == "MGN"
        if first:
            self._put({"MODEL.BACKBONE.STEM_POOL": "padded"}, why="pooling of the stem until 2020-08-14")
        self._head(mgn)
        pool = self["MODEL.HEADS.POOL_LAYER"]
        pools = {"gempool": "GeneralizedMeanPoolingP"} if first else {}
        self._put(
            {"MODEL.HEADS.POOL_LAYER": pools.get(pool) or _value("MODEL.HEADS.POOL_LAYER", pool)},
            "MODEL.HEADS.POOL_LAYER",
        )
        classifier = _value("MODEL.HEADS.CLS_LAYER", self["MODEL.HEADS.CLS_LAYER"])
        self._put({"MODEL.HEADS.CLS_LAYER": classifier}, "MODEL.HEADS.CLS_LAYER")
        if classifier == "Linear":
            for key, value in (("MODEL.HEADS.SCALE", 1), ("MODEL.HEADS.MARGIN", 0.0)):
                self._put({key: value}, key, why="not used by the linear classifier")
        for part in ("BACKBONE", "HEADS"):
            splits = self[f"MODEL.{part}.NORM_SPLIT"] or 1
            ghost = self[f"MODEL.{part}.NORM"] == "GhostBN" and splits > 1
            why = (
                "no counterpart: GhostBN normalizes the whole batch"
                if ghost
                else "no effect: only GhostBN splits batches"
            )
            self._drop(f"MODEL.{part}.NORM_SPLIT", why=why, has_effect=ghost)
        if not self["MODEL.LOSSES.TRI.HARD_MINING"] and self["MODEL.LOSSES.TRI.WEIGHTING"] is None:
            self._put({"MODEL.LOSSES.TRI.WEIGHTING": "fastreid"}, why="the variant of the loss without HARD_MINING")
        if first and self["MODEL.LOSSES.TRI.NORM_FEAT"]:
            self.missing.append("MODEL.LOSSES.TRI.NORM_FEAT True: distances were Euclidean and are squared now")
        if first and mgn:
            self.missing.append(
                "MODEL.META_ARCHITECTURE MGN: v0.1.1 has one pooling layer, and BN and ReLU after each reduction"
            )
            for name, (section, count) in _MGN_LOSSES.items():
                key = f"MODEL.LOSSES.{section}.SCALE"
                if name in self["MODEL.LOSSES.NAME"]:
                    self._put({key: self[key] * count}, key, why=f"MGN now averages its {count} losses")

    def _head(self, mgn: bool) -> None:
        name, width, reduced = (self[f"MODEL.HEADS.{key}"] for key in ("NAME", "IN_FEAT", "REDUCTION_DIM"))
        if _is_old_value({"MODEL.HEADS.NAME": name}, "MODEL.HEADS.NAME"):
            values = {"MODEL.HEADS.NAME": "EmbeddingHead", "MODEL.HEADS.WITH_BNNECK": name != "LinearHead"}
            self._put(values, "MODEL.HEADS.NAME")
        elif self["MODEL.HEADS.WITH_BNNECK"] is None:
            self._put({"MODEL.HEADS.WITH_BNNECK": True})
        if width is not None:
            target = "MODEL.HEADS.EMBEDDING_DIM" if mgn else "MODEL.BACKBONE.FEAT_DIM"
            self._put({target: width}, "MODEL.HEADS.IN_FEAT")
        if name == "ReductionHead":
            self._put({"MODEL.HEADS.EMBEDDING_DIM": reduced}, "MODEL.HEADS.REDUCTION_DIM")
            self.missing.append(
                "MODEL.HEADS.NAME ReductionHead: v0.1.1 has batch norm and leaky ReLU between reduction and neck"
            )
        self._drop("MODEL.HEADS.REDUCTION_DIM", why="no effect without ReductionHead", has_effect=False)

    def _input(self) -> None:
        """Translate augmentation and sampling."""
        identities, naive = self["DATALOADER.PK_SAMPLER"], self["DATALOADER.NAIVE_WAY"]
        sampler = ("NaiveIdentitySampler" if naive else "BalancedIdentitySampler") if identities else "TrainingSampler"
        self._put({"DATALOADER.SAMPLER_TRAIN": sampler}, "DATALOADER.PK_SAMPLER", "DATALOADER.NAIVE_WAY")
        if self.release != "v0.1.1":
            return
        if self["INPUT.CJ.ENABLED"]:
            self._put(
                {"INPUT.CJ.ENABLED": False}, "INPUT.CJ.ENABLED", why="color jitter was never applied in this release"
            )
        if self["INPUT.AUTOAUG.ENABLED"] and self["INPUT.AUTOAUG.PROB"] is None:
            self._put(
                {"INPUT.AUTOAUG.ENABLED": True, "INPUT.AUTOAUG.PROB": 0.0},
                "INPUT.AUTOAUG.ENABLED",
                why="the probability dropped from 1 to 0 within the first few hundred images of each worker",
            )
        if self["INPUT.AUGMIX.ENABLED"] and self["INPUT.AUGMIX.PROB"] is None:
            values = {"INPUT.AUGMIX.ENABLED": True, "INPUT.AUGMIX.PROB": 1.0}
            self._put(values, "INPUT.AUGMIX.ENABLED", why="applied to every image")


def _value(key: str, value: Any) -> Any:
    """Return the current name of an old value."""
    return VALUES[key].get(value, value)


def _listed(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{key} {show_value(value)}" for key, value in pairs)


def _file(source: str) -> str:
    return os.path.basename(source)
