"""Search spaces: a YAML file of config keys, each with what its values are drawn from.

    SOLVER.BASE_LR: {loguniform: [1e-6, 1e-3]}
    SOLVER.WEIGHT_DECAY: {choice: [0.0, 1e-4, 5e-4]}
    IDENTITIES: {randint: [8, 33]}
    DATALOADER.NUM_INSTANCE: {choice: [2, 4, 8]}

``IDENTITIES`` is no key of the config but the number P of identities in a batch. With K images of each
(``DATALOADER.NUM_INSTANCE``) a batch has P x K images, so that it always divides.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fastamp.config import CfgNode
from fastamp.config.defaults import present_path
from fastamp.config.files import parse_yaml
from fastamp.config.key import Key, convert, plain
from fastamp.utils.errors import ConfigError, did_you_mean

IDENTITIES, IMAGES, BATCH = "IDENTITIES", "DATALOADER.NUM_INSTANCE", "SOLVER.IMS_PER_BATCH"
# FastReID's names.
SHORT_NAMES = {
    "lr": "SOLVER.BASE_LR",
    "wd": "SOLVER.WEIGHT_DECAY",
    "wd_bias": "SOLVER.WEIGHT_DECAY_BIAS",
    "delay_epochs": "SOLVER.DELAY_EPOCHS",
    "bsz": BATCH,
    "num_inst": IMAGES,
}
# What makes trials incomparable, or is not the model's.
_NOT_SEARCHED = ("OUTPUT_DIR", "SOLVER.MAX_EPOCH", "TEST.EVAL_PERIOD", "DATASETS.*", "MODEL.DEVICE", "TUNE.*")
_SPACES = Path(__file__).resolve().parents[1] / "configs"
# How many numbers each kind of range has; a choice has any number of values.
_BOUNDS = {"uniform": 2, "loguniform": 2, "randint": 2, "quniform": 3}
KINDS = ("choice", *_BOUNDS)


@dataclass(frozen=True)
class Parameter:
    """One key of a search space.

    Attributes:
        key: a path of the config, or ``IDENTITIES``.
        kind: ``"choice"``; ``"uniform"`` and ``"loguniform"`` from low to high; ``"randint"``, whole numbers from low
            up to, not including, high; ``"quniform"``, low to high in steps.
        values: the choices; or low and high; or low, high and the step.
    """

    key: str
    kind: str
    values: tuple[Any, ...]

    def decode(self, number: Any) -> Any:
        """Return the value that a search algorithm's number stands for: the place of a choice or of a step."""
        number = plain(number)
        if self.kind == "choice":
            return self.values[int(number)]
        return self._on_grid(int(number)) if self.kind == "quniform" else number

    def encode(self, value: float) -> float:
        """Return the number that stands for a value of a range, or for the nearest in it; see ``decode``."""
        low, high = self.extremes()
        value = min(max(value, low), high)
        return round((value - low) / self.values[2]) if self.kind == "quniform" else value

    @property
    def steps(self) -> int:
        """How many steps a ``"quniform"`` range has."""
        low, high, step = self.values
        return math.floor((high - low) / step + 1e-9)

    def extremes(self) -> tuple[Any, ...]:
        """Return the values that any other lies between; all of a choice."""
        if self.kind == "choice":
            return self.values
        low, high = self.values[:2]
        if self.kind == "randint":
            return low, high - 1
        return (self._on_grid(0), self._on_grid(self.steps)) if self.kind == "quniform" else (low, high)

    def around(self, value: float) -> tuple[float, ...]:
        """Return a third of a range's width around a value in it, cut where the range ends."""
        low, high = self.values[:2]
        if self.kind == "loguniform":
            part = (high / low) ** (1 / 6)
            return max(low, value / part), min(high, value * part)
        if self.kind == "uniform":
            part = (high - low) / 6
            return max(low, value - part), min(high, value + part)
        # Whole steps, one to either side at least.
        step = 1 if self.kind == "randint" else self.values[2]
        part = max(1, round((high - low) / step / 6)) * step
        if self.kind == "randint":
            return max(low, value - part), min(high, value + part + 1)
        return max(low, value - part), min(self._on_grid(self.steps), value + part), step

    def _on_grid(self, number: int) -> float:
        low, _, step = self.values
        return low + int(number) * step


class Space:
    """The parameters of a search, and the config that a draw of them makes.

    Args:
        parameters: one for each key.

    Raises:
        ConfigError: keys that contradict each other.
    """

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = {parameter.key: parameter for parameter in parameters}
        if {IDENTITIES, BATCH} <= set(self.parameters):
            raise ConfigError(f"search space: {IDENTITIES} and {BATCH} are both searched; one follows from the other")

    def decoded(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that a search algorithm's sample stands for, see ``Parameter.decode``."""
        return {key: self.parameters[key].decode(number) for key, number in sample.items()}

    def overrides(self, cfg: CfgNode, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return config path -> value for a draw, the size of the batch among them where it follows.

        Args:
            cfg: what is not drawn.
            values: a value for each key; NumPy's numbers become Python's.
        """
        changed = {key: plain(value) for key, value in values.items()}
        identities = changed.pop(IDENTITIES, None)
        if identities is None and not {IMAGES, BATCH} & set(changed):
            return changed
        images = changed.get(IMAGES, cfg.DATALOADER.NUM_INSTANCE)
        if identities is None:
            # The wanted batch, to the nearest that divides.
            wanted = changed.get(BATCH, cfg.SOLVER.IMS_PER_BATCH)
            identities = max(1, round(wanted / images))
        return changed | {BATCH: identities * images}

    def apply(self, cfg: CfgNode, values: Mapping[str, Any]) -> CfgNode:
        """Return a frozen copy of ``cfg`` with a draw.

        Raises:
            ConfigError: the config refuses a value.
        """
        return cfg.with_values(self.overrides(cfg, values))

    def sample_of(self, cfg: CfgNode) -> dict[str, Any] | None:
        """Return the sample that stands for a config's own values, None where one is none of its key's choices."""
        own = {key.path: value for key, value in cfg.keys_below()}
        own[IDENTITIES] = cfg.SOLVER.IMS_PER_BATCH // cfg.DATALOADER.NUM_INSTANCE
        sample: dict[str, Any] = {}
        for key, parameter in self.parameters.items():
            if parameter.kind != "choice":
                sample[key] = parameter.encode(own[present_path(key)])
                continue
            # However a choice is spelled, the config's own changes nothing.
            same = [self.apply(cfg, {key: value}) == cfg for value in parameter.values]
            if True not in same:
                return None
            sample[key] = same.index(True)
        return sample

    def narrowed(self, best: Mapping[str, Any], good: Sequence[Mapping[str, Any]]) -> "Space":
        """Return a space around a draw: of each range a third of its width, of each choice what good draws have.

        Args:
            best: the draw in the middle; where it is near an end, the range ends there.
            good: other draws.
        """
        parameters = []
        for key, each in self.parameters.items():
            if each.kind == "choice":
                kept = [best[key], *(draw[key] for draw in good)]
                values: tuple[Any, ...] = tuple(value for value in each.values if value in kept)
            else:
                values = each.around(best[key])
            parameters.append(Parameter(key, each.kind, values))
        return Space(parameters)

    def check(self, cfg: CfgNode) -> None:
        """Check every choice and both ends of every range against the config.

        Raises:
            ConfigError: the config refuses one, or a range gives fractions to a key of whole numbers.
        """
        types = {key.path: type(key.default) for key, _ in cfg.keys_below()}
        for parameter in self.parameters.values():
            if any(fnmatchcase(parameter.key, pattern) for pattern in _NOT_SEARCHED):
                raise ConfigError(f"search space: {parameter.key} cannot be searched: it must be alike in all trials")
            kind = types.get(present_path(parameter.key), float)
            number = parameter.key == IDENTITIES or kind in (int, float, type(None))
            if parameter.kind != "choice" and not number:
                raise ConfigError(
                    f"search space: {parameter.key} is no number, so {parameter.kind} cannot draw it.\n  fix: choice"
                )
            whole = kind is int or parameter.key == IDENTITIES
            if whole and not _gives_whole_numbers(parameter):
                raise ConfigError(
                    f"search space: {parameter.key} takes whole numbers, and {parameter.kind} "
                    f"{list(parameter.values)} gives fractions.\n  fix: randint, or quniform with whole numbers"
                )
            for value in parameter.extremes():
                if parameter.key == IDENTITIES and value < 1:
                    raise ConfigError(f"search space: {IDENTITIES} is {value}; it must be at least 1")
                try:
                    self.apply(cfg, {parameter.key: value})
                except ConfigError as error:
                    raise ConfigError(f"search space: {str(error).removeprefix('assignment: ')}") from error


def default_space(config_file: str) -> Path:
    """Return the space for a recipe: that whose name begins the config file's name, or is its folder's.

    Raises:
        ConfigError: there is none.
    """
    spaces = {file.stem: file for file in sorted(_SPACES.glob("*.yml"))}
    file = Path(config_file)
    for name, space in spaces.items():
        if file.stem.lower().startswith(name):
            return space
    if file.parent.name.lower() in spaces:
        return spaces[file.parent.name.lower()]
    raise ConfigError(
        f"no search space is known for {config_file or 'the defaults'}.\n  fix: --space FILE, your own or one of "
        f"{', '.join(str(space) for space in spaces.values())}"
    )


def read_space(path: str | Path, cfg: CfgNode) -> Space:
    """Return the search space in a YAML file, checked against a config.

    Raises:
        ConfigError: the file cannot be read, or a key, a kind or a value is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--space {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    content = parse_yaml(text, str(path))
    if not content:
        raise ConfigError(
            f"--space {path} is empty; expected lines such as SOLVER.BASE_LR: {{loguniform: [1e-6, 1e-3]}}"
        )
    space = Space([_as_numbers(each, cfg) for each in _parameters(content, str(path))])
    space.check(cfg)
    return space


def _as_numbers(parameter: Parameter, cfg: CfgNode) -> Parameter:
    """Return a choice of numbers as such, however they are spelled."""
    keys = {key.path: key for key, _ in cfg.keys_below()} | {IDENTITIES: Key(IDENTITIES, 1, "", low=1)}
    key = keys.get(present_path(parameter.key))
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
        present = present_path(str(key))
        if present in seen:
            raise ConfigError(f"{source}: {seen[present]} and {name} are the same key")
        seen[present] = name
        if not isinstance(value, Mapping) or len(value) != 1:
            raise ConfigError(f"{source}: {name}: expected one of {', '.join(KINDS)}, e.g. {{uniform: [0.0, 1.0]}}")
        ((kind, values),) = value.items()
        if kind not in KINDS and isinstance(values, Mapping):
            raise ConfigError(f"{source}: keys are written in one piece: {name}.{kind}: {{...}}")
        if kind not in KINDS:
            raise ConfigError(f"{source}: {name}: {kind!r}; choices: {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
        yield Parameter(key, kind, _values(kind, values, f"{source}: {name}"))


def _values(kind: str, values: Any, where: str) -> tuple[Any, ...]:
    """Return the values of a kind, its numbers as numbers."""
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{where}: {kind} needs a list, got {values!r}")
    if kind == "choice":
        return tuple(tuple(value) if isinstance(value, list) else value for value in values)
    if len(values) != _BOUNDS[kind]:
        form = "[low, high, step]" if _BOUNDS[kind] == 3 else "[low, high]"
        raise ConfigError(f"{where}: {kind} needs {form}, got {values!r}")
    try:
        # YAML 1.1 reads 1e-6 as text.
        numbers = [value if isinstance(value, int) else float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {kind} needs numbers, got {values!r}") from error
    low, high, step = (*numbers, 1.0)[:3]
    if not all(map(math.isfinite, numbers)) or low >= high or step <= 0:
        raise ConfigError(f"{where}: {kind} {values!r}: expected low < high{', step > 0' if len(numbers) == 3 else ''}")
    if kind == "loguniform" and low <= 0:
        raise ConfigError(f"{where}: loguniform needs numbers above 0, got {values!r}")
    if kind == "randint" and not all(isinstance(number, int) for number in numbers):
        raise ConfigError(f"{where}: randint needs whole numbers, got {values!r}")
    return tuple(numbers)


def _gives_whole_numbers(parameter: Parameter) -> bool:
    if parameter.kind in ("choice", "randint"):
        return True
    return parameter.kind == "quniform" and all(float(number).is_integer() for number in parameter.values)
