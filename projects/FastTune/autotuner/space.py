"""Search spaces: YAML files that map config keys to distributions of their values.

    SOLVER.BASE_LR: {loguniform: [1e-6, 1e-3]}
    SOLVER.WEIGHT_DECAY: {choice: [0.0, 1e-4, 5e-4]}
    IDENTITIES: {randint: [8, 33]}
    DATALOADER.NUM_INSTANCE: {choice: [2, 4, 8]}

``IDENTITIES`` is not a config key but the number P of identities per batch. With K images per identity
(``DATALOADER.NUM_INSTANCE``), a batch has P x K images, so the batch size is always a multiple of K.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fastamp.config import CfgNode
from fastamp.config.files import parse_yaml
from fastamp.config.key import Key, convert, plain
from fastamp.config.releases import current_path
from fastamp.utils.errors import ConfigError, did_you_mean, system_cause

IDENTITIES, IMAGES, BATCH = "IDENTITIES", "DATALOADER.NUM_INSTANCE", "SOLVER.IMS_PER_BATCH"
# Names that FastReID uses.
SHORT_NAMES = {
    "lr": "SOLVER.BASE_LR",
    "wd": "SOLVER.WEIGHT_DECAY",
    "wd_bias": "SOLVER.WEIGHT_DECAY_BIAS",
    "delay_epochs": "SOLVER.DELAY_EPOCHS",
    "bsz": BATCH,
    "num_inst": IMAGES,
}
# Keys that would make trials incomparable, or that do not affect the model.
_NOT_SEARCHED = ("OUTPUT_DIR", "SOLVER.MAX_EPOCH", "TEST.EVAL_PERIOD", "DATASETS.*", "MODEL.DEVICE", "TUNE.*")
_SPACES = Path(__file__).resolve().parents[1] / "configs"
# Number of values in each kind of range; a choice has any number of values.
_BOUNDS = {"uniform": 2, "loguniform": 2, "randint": 2, "quniform": 3}
KINDS = ("choice", *_BOUNDS)


@dataclass(frozen=True)
class Parameter:
    """One key of a search space.

    Attributes:
        key: config key, or ``IDENTITIES``.
        kind: ``"choice"``; ``"uniform"`` or ``"loguniform"`` in [low, high]; ``"randint"``, integers in [low, high);
            ``"quniform"``, multiples of a step in [low, high].
        values: the choices; (low, high); or (low, high, step).
    """

    key: str
    kind: str
    values: tuple[Any, ...]

    def decode(self, number: Any) -> Any:
        """Convert a sampled number to a parameter value. For choices and stepped ranges, the number is an index."""
        number = plain(number)
        if self.kind == "choice":
            return self.values[int(number)]
        return self._on_grid(int(number)) if self.kind == "quniform" else number

    def encode(self, value: float) -> float:
        """Clamp a value to the range and convert it to the number that represents it; inverse of ``decode``."""
        low, high = self.extremes()
        value = min(max(value, low), high)
        return round((value - low) / self.values[2]) if self.kind == "quniform" else value

    @property
    def steps(self) -> int:
        """Number of steps in a ``"quniform"`` range."""
        low, high, step = self.values
        return math.floor((high - low) / step + 1e-9)

    def extremes(self) -> tuple[Any, ...]:
        """Return the smallest and the largest value of a range, or all values of a choice."""
        if self.kind == "choice":
            return self.values
        low, high = self.values[:2]
        if self.kind == "randint":
            return low, high - 1
        return (self._on_grid(0), self._on_grid(self.steps)) if self.kind == "quniform" else (low, high)

    def around(self, value: float) -> tuple[float, ...]:
        """Return bounds of a range around ``value``, a third as wide and clipped to the original range."""
        low, high = self.values[:2]
        if self.kind == "loguniform":
            part = (high / low) ** (1 / 6)
            return max(low, value / part), min(high, value * part)
        if self.kind == "uniform":
            part = (high - low) / 6
            return max(low, value - part), min(high, value + part)
        # Whole steps, at least one on either side.
        step = 1 if self.kind == "randint" else self.values[2]
        part = max(1, round((high - low) / step / 6)) * step
        if self.kind == "randint":
            return max(low, value - part), min(high, value + part + 1)
        return max(low, value - part), min(self._on_grid(self.steps), value + part), step

    def _on_grid(self, number: int) -> float:
        low, _, step = self.values
        return low + int(number) * step


class Space:
    """Search space, which converts samples to config values.

    Args:
        parameters: parameters, one per key.

    Raises:
        ConfigError: if both ``IDENTITIES`` and SOLVER.IMS_PER_BATCH are in the space.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = {parameter.key: parameter for parameter in parameters}
        if {IDENTITIES, BATCH} <= set(self.parameters):
            raise ConfigError(
                f"search space: {IDENTITIES} and {BATCH} cannot be combined, since one determines the other.\n"
                "  fix: remove one of them"
            )

    def decoded(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a sample to values; see ``Parameter.decode``."""
        return {key: self.parameters[key].decode(number) for key, number in sample.items()}

    def overrides(self, cfg: CfgNode, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config keys to set for a trial, config key -> value, including the resulting batch size.

        Args:
            cfg: config with the values of all other keys.
            values: value of each key of the space; NumPy scalars are converted to Python scalars.
        """
        changed = {key: plain(value) for key, value in values.items()}
        identities = changed.pop(IDENTITIES, None)
        if identities is None and not {IMAGES, BATCH} & set(changed):
            return changed
        images = changed.get(IMAGES, cfg.DATALOADER.NUM_INSTANCE) or 4
        if identities is None:
            # Round the batch size to a multiple of the images per identity.
            batch = changed.get(BATCH, cfg.SOLVER.IMS_PER_BATCH)
            identities = max(1, round(batch / images))
        return changed | {BATCH: identities * images}

    def apply(self, cfg: CfgNode, values: Mapping[str, Any]) -> CfgNode:
        """Return a frozen copy of ``cfg`` with the values of a trial; see ``overrides``.

        Raises:
            ConfigError: if a value is invalid.
        """
        return cfg.with_values(self.overrides(cfg, values))

    def sample_of(self, cfg: CfgNode) -> dict[str, Any] | None:
        """Return the values of ``cfg`` as a sample, the inverse of ``decoded``; values outside of a range are clamped.

        Returns:
            Key -> sampled number. None if a value of ``cfg`` is not among the choices of the key.
        """
        defaults = {key.path: value for key, value in cfg.keys_below()}
        defaults[IDENTITIES] = cfg.SOLVER.IMS_PER_BATCH // (cfg.DATALOADER.NUM_INSTANCE or 4)
        sample: dict[str, Any] = {}
        for key, parameter in self.parameters.items():
            if parameter.kind != "choice":
                sample[key] = parameter.encode(defaults[current_path(key)])
                continue
            # Compare configs, since one value may have several spellings.
            same = [self.apply(cfg, {key: value}) == cfg for value in parameter.values]
            if True not in same:
                return None
            sample[key] = same.index(True)
        return sample

    def narrowed(self, best: Mapping[str, Any], good: Sequence[Mapping[str, Any]]) -> "Space":
        """Return a smaller space around the values of the best trial.

        Each range shrinks to a third of its width and is clipped to the original bounds; each choice keeps only the
        values of the best trial and the good trials.

        Args:
            best: values of the best trial, as returned by ``decoded``.
            good: values of further trials with high scores.
        """
        parameters = []
        for key, parameter in self.parameters.items():
            if parameter.kind == "choice":
                kept = [best[key], *(values[key] for values in good)]
                values: tuple[Any, ...] = tuple(value for value in parameter.values if value in kept)
            else:
                values = parameter.around(best[key])
            parameters.append(Parameter(key, parameter.kind, values))
        return Space(parameters)

    def check(self, cfg: CfgNode) -> None:
        """Check that every choice and both bounds of every range are valid in ``cfg``.

        Raises:
            ConfigError: if a key cannot be searched, a value is invalid, or a range contains non-integer values for an
                integer key.
        """
        keys = _keys(cfg)
        for parameter in self.parameters.values():
            if any(fnmatchcase(parameter.key, pattern) for pattern in _NOT_SEARCHED):
                raise ConfigError(
                    f"search space: {parameter.key} cannot be searched: it must be the same in all trials.\n"
                    f"  fix: remove it from the space, and set {parameter.key} for all trials instead"
                )
            key = keys.get(current_path(parameter.key))
            kind = type(key.default) if key else float
            if parameter.kind != "choice" and kind not in (int, float, type(None)):
                raise ConfigError(
                    f"search space: {parameter.key} is not a number, so {parameter.kind} cannot sample it.\n"
                    "  fix: use choice"
                )
            if kind is int and not _gives_whole_numbers(parameter):
                raise ConfigError(
                    f"search space: {parameter.key} must be an integer, but {parameter.kind} "
                    f"{list(parameter.values)} yields non-integers.\n  fix: use randint, or quniform with integers"
                )
            for value in parameter.extremes():
                try:
                    if parameter.key == IDENTITIES:
                        convert(keys[IDENTITIES], value)
                    self.apply(cfg, {parameter.key: value})
                except ConfigError as error:
                    raise ConfigError(f"search space: {str(error).removeprefix('assignment: ')}") from error


def default_space(config_file: str) -> Path:
    """Find the search space of a recipe in ``projects/FastTune/configs``.

    The name of the space is a prefix of the recipe's file name, or the name of the recipe's folder.

    Raises:
        ConfigError: if there is no such space.
    """
    spaces = {file.stem: file for file in sorted(_SPACES.glob("*.yml"))}
    file = Path(config_file)
    name = next((name for name in spaces if file.stem.lower().startswith(name)), file.parent.name.lower())
    if name in spaces:
        return spaces[name]
    raise ConfigError(
        f"no search space found for {config_file or 'the default config'}.\n  fix: add --space FILE, with a new file "
        f"or one of {', '.join(str(space) for space in spaces.values())}"
    )


def read_space(path: str | Path, cfg: CfgNode) -> Space:
    """Read a search space from a YAML file and validate it with a config.

    Raises:
        ConfigError: if the file cannot be read, or a key, a kind or a value is invalid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--space: cannot read {path}: {system_cause(error)}.\n  fix: give the path of a readable UTF-8 file"
        ) from error
    content = parse_yaml(text, str(path))
    if not content:
        raise ConfigError(
            f"--space: {path}: expected the keys to search, got an empty file.\n"
            "  fix: write one line for each key, e.g. SOLVER.BASE_LR: {loguniform: [1e-6, 1e-3]}"
        )
    space = Space([_as_numbers(parameter, cfg) for parameter in _parameters(content, str(path))])
    space.check(cfg)
    return space


def _keys(cfg: CfgNode) -> dict[str, Key]:
    return {key.path: key for key, _ in cfg.keys_below()} | {IDENTITIES: Key(IDENTITIES, 1, "", low=1)}


def _as_numbers(parameter: Parameter, cfg: CfgNode) -> Parameter:
    """Convert the values of a choice to the number type of the key."""
    key = _keys(cfg).get(current_path(parameter.key))
    if parameter.kind != "choice" or key is None or type(key.default) not in (int, float):
        return parameter
    try:
        return replace(parameter, values=tuple(convert(key, value) for value in parameter.values))
    except ConfigError as error:
        raise ConfigError(f"search space: {error}") from error


def _parameters(content: Mapping[str, Any], source: str) -> Iterator[Parameter]:
    seen: dict[str, str] = {}
    for name, value in content.items():
        key = SHORT_NAMES.get(name, name)
        present = current_path(str(key))
        if present in seen:
            raise ConfigError(f"{source}: {seen[present]} and {name} are the same key.\n  fix: remove one of them")
        seen[present] = name
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ConfigError(
                f"{source}: {name}: expected one of {', '.join(KINDS)}, got {value!r}.\n"
                f"  fix: write one of them, e.g. {name}: {{uniform: [0.0, 1.0]}}"
            )
        ((kind, values),) = value.items()
        if kind not in KINDS and isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: expected dotted keys, got nested keys below {name}.\n  fix: write {name}.{kind}: {{...}}"
            )
        if kind not in KINDS:
            raise ConfigError(
                f"{source}: {name}: unknown kind {kind!r}.{did_you_mean(kind, KINDS)}\n  choices: {', '.join(KINDS)}"
            )
        yield Parameter(key, kind, _values(kind, values, f"{source}: {name}"))


def _values(kind: str, values: Any, where: str) -> tuple[Any, ...]:
    """Validate the values of a parameter; convert numbers that YAML reads as text, e.g. 1e-6, to floats."""
    if not isinstance(values, list) or not values:
        raise _values_error(where, kind, "at least one value", values)
    if kind == "choice":
        return tuple(values)
    if len(values) != _BOUNDS[kind]:
        form = "low, high and step" if _BOUNDS[kind] == 3 else "low and high"
        raise _values_error(where, kind, form, values)
    try:
        # YAML 1.1 reads 1e-6 as text.
        numbers = [value if isinstance(value, int) else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise _values_error(where, kind, "numbers", values) from error
    low, high, step = (*numbers, 1.0)[:3]
    if not all(map(math.isfinite, numbers)) or low >= high or step <= 0:
        raise _values_error(
            where, kind, f"finite numbers, low < high{' and step > 0' if len(numbers) == 3 else ''}", values
        )
    if kind == "loguniform" and low <= 0:
        raise _values_error(where, kind, "numbers above 0", values)
    if kind == "randint" and not all(isinstance(number, int) for number in numbers):
        raise _values_error(where, kind, "integers", values)
    return tuple(numbers)


def _values_error(where: str, kind: str, expected: str, values: Any) -> ConfigError:
    return ConfigError(
        f"{where}: {kind}: expected {expected}, got {values!r}.\n  fix: set {kind} to a list of {expected}"
    )


def _gives_whole_numbers(parameter: Parameter) -> bool:
    if parameter.kind in ("choice", "randint"):
        return True
    return parameter.kind == "quniform" and all(float(number).is_integer() for number in parameter.values)
