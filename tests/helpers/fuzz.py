"""Fuzzed inputs, and a time limit, a memory limit and write checks for commands that read them."""

import io
import os
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from fastamp.config.defaults import KEYS

SECONDS = 300
MEMORY = 6 * 2**30
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
_EXECUTED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")

NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63 - 1, 2**63, 10**30, -(2**63)),
    *(0.0, -0.0, 0.5, 1.5, -0.1, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", "\0", "\x1b[31m", "\ud800", "é\u202e", "none", "null", "auto", "true", "off", "1", "-1", "1e3", "nan"),
    *("(1, 2)", "[1, [2]]", "{a: 1}", "('a',", "../../x", "/dev/zero", "/dev/null", "~no-such-user/x", "~", ".", ".."),
    *("/", "csv:", "folder:", "csv:/dev/zero", "csv:..", "x" * 5000, "%s%n{0}", "*", "[", "(?P<"),
    *([], [[]], [None], [1, 2], [0.5, "a"], [-1, -1], [1, 1], [0, 0], ["a", "a"], [float("nan")] * 3),
    *({}, {"a": 1}, {"ENABLED": True}, {"ENABLED": {"ENABLED": 1}}, {1: 2}, {None: None}, {"": ""}, {"a.b": {"c": []}}),
]
"""Values that may be invalid for a config key."""


class Hang(Exception):
    """Raised if a command exceeds the time limit."""


class Watch:
    """Audit hook that records programs started and writes outside of allowed folders. Audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] = ()
        self.seen: list[str] = []
        self.active = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in _EXECUTED:
            self.seen.append(f"{event} {arguments[:2]!r:.200}")
        elif event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and isinstance(flags, int) and flags & _WRITING:
                self._check(event, path)
        elif event in _EVENTS:
            for path in arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._check(event, path)

    def _check(self, event: str, path: Any) -> None:
        if "\0" in os.fsdecode(path):
            return
        self.active = False  # realpath itself may trigger audit events
        try:
            real = os.path.realpath(os.fsdecode(path))
        finally:
            self.active = True
        if not any(real == folder or real.startswith(f"{folder}/") for folder in self.allowed):
            self.seen.append(f"{event} {real}")

    @contextmanager
    def over(self, *allowed: Path) -> Iterator[None]:
        """Context manager that records violations; writing is allowed below ``allowed``."""
        self.seen.clear()
        self.allowed = (*(os.path.realpath(folder) for folder in allowed), "/dev/null", "/proc")
        self.active = True
        try:
            yield
        finally:
            self.active = False


@contextmanager
def bounded(seconds: int = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Context manager that raises Hang after ``seconds`` and limits additional memory to ``memory`` bytes."""

    def expire(number: int, frame: Any) -> None:
        raise Hang(f"still running after {seconds} s")

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + memory, hard))
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, expire) if main else None
    if main:
        signal.alarm(seconds)
    try:
        yield
    finally:
        if main:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ---- bytes


def damage(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    """Flip, remove, repeat or overwrite random bytes of ``content``, or insert bytes of other files."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place, count = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 64, 500))
        kind = rng.randrange(7)
        if kind <= 1 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            del data[place : place + count]
        elif kind == 4:
            data[place:place] = data[place : place + count]
        elif kind == 5:
            other = rng.choice(others)
            data[place:] = other[rng.randrange(len(other) + 1) :]
        else:
            data[place : place + count] = rng.choice((b"\0" * count, b"\xff" * count, rng.randbytes(count)))
    return bytes(data)


def image_files() -> dict[str, bytes]:
    """Encode a small image in each format."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 16, 3), dtype=np.uint8)
    picture, files = Image.fromarray(pixels), {}
    for kind, options in {"PNG": {}, "JPEG": {}, "BMP": {}, "WEBP": {}, "GIF": {}, "TIFF": {}, "PPM": {}}.items():
        stream = io.BytesIO()
        picture.save(stream, kind, **options)
        files[kind] = stream.getvalue()
    for kind, mode in (("PNG", "P"), ("PNG", "I;16"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("JPEG", "L"), ("TIFF", "F")):
        stream = io.BytesIO()
        gray = mode in ("I;16", "F")
        image = Image.fromarray(pixels[..., 0].astype({"I;16": np.uint16, "F": np.float32}[mode])) if gray else None
        (image or picture.convert(mode)).save(stream, kind)
        files[f"{kind} {mode}"] = stream.getvalue()
    stream = io.BytesIO()
    picture.save(stream, "JPEG", progressive=True, exif=Image.Exif().tobytes() + b"\x12\x01")
    files["JPEG progressive"] = stream.getvalue()
    return files


# ---- configs


def nasty_value(rng: random.Random, key: str | None = None) -> Any:
    """Draw a value for a config key: possibly invalid, or close to the default."""
    default = KEYS[key].default if key in KEYS else None
    if KEYS.get(key) is not None and KEYS[key].choices and rng.random() < 0.3:
        return rng.choice(KEYS[key].choices)
    if isinstance(default, int | float) and not isinstance(default, bool) and rng.random() < 0.5:
        return rng.choice((default * 2, -default, default + 1, default / 3, [default], str(default), default * 10**9))
    if isinstance(default, tuple | list) and default and rng.random() < 0.5:
        return rng.choice(([*default, *default], list(default[:-1]), [nasty_value(rng) for _ in default], default[0]))
    return rng.choice(NASTY)


def nasty_config(rng: random.Random, config: dict[str, Any]) -> bytes:
    """Create a config file from ``config`` with random invalid values and sometimes damaged bytes."""
    config = yaml.safe_load(yaml.safe_dump(config))
    keys = list(KEYS)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        key = rng.choice(keys)
        *sections, name = key.split(".")
        if rng.random() < 0.15:
            name = rng.choice((name.lower(), name + "S", name[:-1], "", "ENABLED", "_BASE_", "update"))
        if rng.random() < 0.15 and sections:
            name = sections.pop()  # a section becomes a value
        node: Any = config
        for section in sections:
            if not isinstance(node.get(section), dict):
                node[section] = {}
            node = node[section]
        node[name] = nasty_value(rng, key)
    try:
        text = yaml.safe_dump(config, allow_unicode=rng.random() < 0.5, sort_keys=False)
        content = text.encode()
    except (yaml.YAMLError, UnicodeEncodeError):
        content = yaml.safe_dump(config).encode(errors="replace")
    if rng.random() < 0.25:
        spice = [b"&a [*a, *a]", b"!!python/object/apply:os.system [id]", b"<<: *a", b"\t", b"- ", b"? ", b"{" * 900]
        content = damage(rng, content, [*spice, content])
    return content


# ---- CSV files

_CELLS = [
    *("", "a.png", "a.jpg", "../a.png", "/dev/zero", "/etc/passwd", "~no-such-user/a.png", "a.png\0", "a\nb", "=1+1"),
    *("-1", "0", "1", "9" * 20, "1e3", "nan", "inf", "train", "query", "gallery", "Train", "test", '"', "\x1b[2J", "é"),
    *("\u202e", "a" * 300),
]


def nasty_csv(rng: random.Random, rows: list[list[str]]) -> bytes:
    """Create a CSV file from ``rows`` with random changes to cells, columns and lines, and sometimes damaged bytes."""
    rows = [list(row) for row in rows]
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        row = rng.choice(rows)
        kind = rng.randrange(7)
        if kind <= 2 and row:
            row[rng.randrange(len(row))] = rng.choice(_CELLS)
        elif kind == 3:
            column = rng.randrange(8)
            for line in rows:
                del line[column : column + 1]
        elif kind == 4:
            rows.append(list(rng.choice(rows)))
        elif kind == 5 and len(rows) > 1:
            rows.remove(row)
        else:
            for number, line in enumerate(rows):
                line += [
                    ("x0", "y0", "x1", "y1")[n] if number == 0 else rng.choice([*_CELLS, "0", "1", "16"])
                    for n in range(4)
                ]
    delimiter = rng.choice((",", ",", ";", "\t"))
    quote = rng.random() < 0.3
    lines = [delimiter.join(f'"{cell}"' if quote else cell for cell in row) for row in rows]
    content = rng.choice(("\n", "\n", "\r\n", "\r")).join(lines).encode()
    return damage(rng, content, [content, b'"', b"\xff\xfe", b"\xef\xbb\xbf"]) if rng.random() < 0.3 else content


# ---- checkpoints


def nasty_checkpoint(rng: random.Random, content: Any) -> Any:
    """Copy the content of a checkpoint, and remove entries or change their types and shapes."""
    places = list(_places(content, ()))
    changes: dict[tuple[Any, ...], Any] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # Choose the depth first: most of the entries are deeply nested random states.
        depth = rng.choice((1, 2, 2, 3, 3, 4, 5))
        found = [place for place in places if len(place) <= depth] or places
        deepest = [place for place in found if len(place) == depth] or found
        changes[rng.choice(deepest)] = rng.choice(_CHANGES)
    return _changed(content, (), changes, rng)


_DROP = object()
_SCALARS = (0, 1, -1, 2**62, 10**400, 1.5, float("nan"), float("inf"), True, "x", "", b"x", None)


def _tensors() -> list[torch.Tensor]:
    plain = [torch.zeros(0), torch.zeros(3), torch.tensor(1.0), torch.tensor(2), torch.tensor([True])]
    odd = [torch.ones(2, 2).to_sparse(), torch.zeros(1, device="meta"), torch.zeros(2, dtype=torch.complex64)]
    return [*plain, *odd, torch.zeros(1).expand(10**6, 10**6)]


def _another_container(value: Any, rng: random.Random) -> Any:
    return rng.choice(([], {}, (), [[]], [value], {"a": value}, {1: value}, (value, value)))


def _another_tensor(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return rng.choice((value.double(), value.long(), value.flatten(), value[None], value * float("nan"), value.half()))


def _shared_many_times(value: Any, rng: random.Random) -> Any:
    kind = rng.choice((tuple, list))
    for _ in range(rng.choice((3, 20, 60))):
        value = kind((value, value))
    return value


def _many_keys(value: Any, rng: random.Random) -> Any:
    factor = rng.choice((1, 2**61 - 1))
    extra = {number * factor: 0 for number in range(rng.choice((10, 2000)))}
    return value | extra if isinstance(value, dict) else extra


_CHANGES: list[Callable[[Any, random.Random], Any]] = [
    lambda value, rng: _DROP,
    lambda value, rng: rng.choice(_SCALARS),
    lambda value, rng: rng.choice(_tensors()),
    _another_container,
    _shared_many_times,
    _many_keys,
    _another_tensor,
    lambda value, rng: -value if isinstance(value, int | float) else value,
    lambda value, rng: value * 3 if isinstance(value, int | float | str | list | tuple) else value,
]


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for number, element in enumerate(value[:5]):
            yield from _places(element, (*path, number))


def _changed(value: Any, path: tuple[Any, ...], changes: dict[tuple[Any, ...], Any], rng: random.Random) -> Any:
    if path in changes:
        return changes[path](value, rng)
    if not any(place[: len(path)] == path for place in changes):
        return value
    if isinstance(value, dict):
        inner = {key: _changed(entry, (*path, key), changes, rng) for key, entry in value.items()}
        return {key: entry for key, entry in inner.items() if entry is not _DROP}
    if isinstance(value, list | tuple):
        elements = [_changed(element, (*path, number), changes, rng) for number, element in enumerate(value)]
        return type(value)(element for element in elements if element is not _DROP)
    return value


# ---- arrays in npz files


def nasty_arrays(rng: random.Random, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove random arrays, or change their shapes and dtypes."""
    arrays = dict(arrays)
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(sorted(arrays))
        with suppress(TypeError, ValueError):  # the change is not applicable to an array that was already changed
            arrays[name] = rng.choice(_ARRAY_CHANGES)(arrays[name])
        if rng.random() < 0.15 and len(arrays) > 1:
            del arrays[name]
    return arrays


_ARRAY_CHANGES: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda array: array[:-1] if array.ndim else array[None],
    lambda array: array[:0] if array.ndim else np.zeros(0),
    lambda array: array[None],
    lambda array: array.T,
    lambda array: array.astype("U"),
    lambda array: array.astype("S"),
    lambda array: np.zeros(array.shape, np.float16) + np.float16("nan"),
    lambda array: np.full(array.shape, 2**63, np.uint64),
    lambda array: np.full(array.shape, -(2**63)),
    lambda array: np.zeros(array.shape, bool),
    lambda array: np.zeros(array.shape, "datetime64[s]"),
    lambda array: np.zeros(array.shape, [("a", "<i4"), ("b", "<U3", 2)]),
    lambda array: np.zeros(array.shape, complex),
    lambda array: np.zeros(array.shape, ">f8"),
    lambda array: np.array(1e30),
    lambda array: np.array(""),
    lambda array: np.zeros((1,) * 32),
    lambda array: np.zeros((0, 10**9, 3)),
]
