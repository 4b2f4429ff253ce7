"""Rows that compare a published result with the one measured here.

Each row is one JSON file, so that results of other people are added by copying their files. The page "Results" of the
documentation lists the files in ``docs/results``.
"""

import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scipy import stats

from fastamp.config import get_cfg
from fastamp.data.datasets import DATASET_REGISTRY
from fastamp.data.datasets.base import ImageItem
from fastamp.data.random_splits import random_splits
from fastamp.utils.errors import DataError, writing
from fastamp.utils.files import folder_name, write_atomically
from fastamp.utils.plural import plural
from fastamp.zoo import Entry, list_entries

FORMAT = 1
METRICS = {"mAP": "mAP", "Rank-1": "rank1", "mINP": "mINP"}
"""Metric of an evaluation -> its name in the catalog."""
# Published name of a test set -> name of the dataset, and the keys that select it.
_TEST_SETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Market-1501": ("Market1501", {}),
    "DukeMTMC-reID": ("DukeMTMC", {}),
    "Occluded-Duke": ("OccludedDuke", {}),
    "MSMT17": ("MSMT17", {}),
    "CUHK03-L": ("CUHK03", {"DATASETS.CUHK03.LABELED": True}),
    "CUHK03 detected": ("CUHK03", {"DATASETS.CUHK03.LABELED": False}),
    "VeRi-776": ("VeRi", {}),
    "VehicleID (800)": ("SmallVehicleID", {}),
    "VehicleID small (800)": ("SmallVehicleID", {}),
    "VehicleID medium (1600)": ("MediumVehicleID", {}),
    "VehicleID large (2400)": ("LargeVehicleID", {}),
    "VERI-Wild small (3000)": ("SmallVeRiWild", {}),
    "VERI-Wild medium (5000)": ("MediumVeRiWild", {}),
    "VERI-Wild large (10000)": ("LargeVeRiWild", {}),
}
# Part of the description of a published protocol -> keys that set it; everything else is set by the recipe.
_PROTOCOLS: Mapping[str, Mapping[str, Any]] = {
    "with re-ranking": {"TEST.RERANK.ENABLED": True},
    "no re-ranking": {"TEST.RERANK.ENABLED": False},
    "euclidean distance": {"TEST.METRIC": "euclidean"},
    "cosine distance": {"TEST.METRIC": "cosine"},
    "averages with the flipped image": {"TEST.FLIP.ENABLED": True},
}


@dataclass(frozen=True)
class Target:
    """Test set and protocol under which figures were published.

    Attributes:
        dataset: registered name of the test set.
        keys: config keys of the test set and the protocol.
        published: figures of the catalog under this protocol, in percent; empty if there are none.
    """

    dataset: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    published: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published result and its reproduction.

    Attributes:
        name: name in the catalog, or recipe.
        kind: ``evaluation`` of a published file, or ``training`` of a recipe.
        dataset, protocol: test set, and how it was evaluated here.
        published: published figures in percent, see ``Entry.results``; empty if there are none.
        measured: metric -> ``value`` and, except for mINP of one evaluation, ``low`` and ``high`` of the interval, in
            percent.
        interval: method of the interval.
        difference: metric -> measured value minus the first published one.
        data: ``<dataset> <split>`` -> ``fingerprint``, of the query, gallery and, in a training, the training images.
        settings: config keys that the user has set.
        versions, hardware: of the software; ``device`` and ``system``.
        seconds, peak_memory_mib: time of the evaluation or of all trainings, and peak memory; on a CPU that of the
            process, which may have measured other rows before.
        seeds: seeds of the trainings. Default none.
        sha256: SHA-256 of the published file. Default "".
        date: day of the measurement, ISO 8601.
        format: version of this format.
    """

    name: str
    kind: str
    dataset: str
    protocol: str
    published: Sequence[Mapping[str, Any]]
    measured: Mapping[str, Mapping[str, float]]
    interval: str
    difference: Mapping[str, float]
    data: Mapping[str, Any]
    settings: Mapping[str, str]
    versions: Mapping[str, str]
    hardware: Mapping[str, str]
    seconds: float
    peak_memory_mib: float
    date: str
    seeds: Sequence[int] = ()
    sha256: str = ""
    format: int = FORMAT


def targets_of(entry: Entry) -> list[Target]:
    """List the test sets and protocols of the published figures that fastamp can evaluate.

    Figures of the same protocol, such as those of the paper and of its program, are in one target. Those on a dataset
    with several random splits are means over all splits.
    """
    found: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Mapping[str, Any]]] = {}
    for result in entry.results:
        dataset, keys = _test_set(result)
        if dataset and any(result.get(name) is not None for name in METRICS.values()):
            if random_splits(get_cfg().with_values(dict(keys)), dataset):
                keys = {**keys, "TEST.ALL_SPLITS": True}
            for part, values in _PROTOCOLS.items():
                keys = {**keys, **values} if part in (result.get("protocol") or "") else keys
            found.setdefault((dataset, tuple(keys.items())), []).append(result)
    return [Target(dataset, dict(keys), published) for (dataset, keys), published in found.items()]


def _test_set(result: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the dataset of a published figure, and the keys that select it; "" if fastamp has no such test set."""
    name = result["test_set"]
    return _TEST_SETS.get(name, (name if name in DATASET_REGISTRY else "", {}))


def published_of_recipe(recipe: str, dataset: str, training_sets: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the published figures, without re-ranking, of the first file that was trained with a recipe.

    Args:
        recipe: name of the recipe.
        dataset: test set.
        training_sets: DATASETS.NAMES of the recipe; the catalog also names recipes whose training set differs.
    """
    for entry in list_entries():
        if entry.recipe == recipe and _test_set({"test_set": entry.training_data})[0] in training_sets:
            figures = [result for result in entry.results if _test_set(result)[0] == dataset]
            if plain := [result for result in figures if "with re-ranking" not in (result.get("protocol") or "")]:
                return plain
    return []


def fingerprint(items: Iterable[ImageItem], root: Path) -> dict[str, Any]:
    """Describe images, without reading them.

    Args:
        items: images of a split, or of all random splits; the same image counts once.
        root: data root.

    Returns:
        ``folder`` that contains the images, below the data root; numbers of ``images``, ``identities`` and ``cameras``;
        ``names``: 16 hex digits of the SHA-256 of the sorted names below this folder, with boxes; and ``bytes``: size
        of all files, which differs between versions with the same names, such as MSMT17 V1 and V2.

    Raises:
        DataError: if an image is missing.
    """
    items = list({(item.path, item.box): item for item in items}.values())
    paths = {item.path for item in items}
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else str(root)
    names = sorted(f"{os.path.relpath(item.path, folder)} {item.box or ''}".strip() for item in items)
    try:
        size = sum(os.stat(path).st_size for path in paths)
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}.\n  fix: complete the dataset") from error
    return {
        "folder": Path(os.path.relpath(folder, root)).as_posix(),
        "images": len(items),
        "identities": len({item.pid for item in items}),
        "cameras": len({item.camid for item in items}),
        "names": hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16],
        "bytes": size,
    }


def has_published_counts(data: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return True if the numbers of images and identities of all splits are known and equal the published ones.

    Args:
        data: ``<dataset> <split>`` -> ``fingerprint``.
    """
    for name, found in data.items():
        dataset, split = name.rsplit(" ", 1)
        known = DATASET_REGISTRY.get(dataset).published_counts if dataset in DATASET_REGISTRY else {}
        counts = (found["images"], found["identities"])
        published = known.get(split, (0, 0))
        if not any(published) or any(one not in (0, other) for one, other in zip(published, counts, strict=True)):
            return False
    return bool(data)


def summarize(results: Sequence[Mapping[str, Any]]) -> tuple[dict[str, dict[str, float]], str]:
    """Compute the measured values of a row and their intervals.

    Args:
        results: metrics of one evaluation, or of the run of each seed, in percent.

    Returns:
        ``measured`` and ``interval`` of the row: for one result the bootstrap interval over its queries, or the
        standard deviation over its random splits; for several the t interval of the mean over the seeds.
    """
    measured: dict[str, dict[str, float]] = {}
    for name in METRICS:
        values = [float(result[name]) for result in results if name in result]
        if len(values) < len(results):
            continue
        measured[name] = {"value": statistics.fmean(values)}
        if len(values) > 1:
            half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
            measured[name] |= {"low": measured[name]["value"] - half, "high": measured[name]["value"] + half}
        elif name in results[0].get("std", {}):
            value, deviation = values[0], results[0]["std"][name]
            measured[name] |= {"low": value - deviation, "high": value + deviation}
        elif name in results[0].get("intervals", {}):
            measured[name] |= dict(zip(("low", "high"), results[0]["intervals"][name], strict=True))
    if len(results) > 1:
        return measured, f"95 % t interval of the mean over {len(results)} seeds"
    if "splits" in results[0]:
        return measured, f"one standard deviation over {len(results[0]['splits'])} splits"
    return measured, "95 % bootstrap over queries"


def difference(measured: Mapping[str, Mapping[str, float]], published: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return metric -> measured value minus the first published one, for the metrics that have both."""
    first = published[0] if published else {}
    return {
        name: round(measured[name]["value"] - first[key], 4)
        for name, key in METRICS.items()
        if name in measured and first.get(key) is not None
    }


def row_file(folder: Path, name: str, dataset: str, identity: Mapping[str, Any]) -> Path:
    """Return the file of a row.

    Args:
        folder: folder of the rows.
        name, dataset: see ``Row``.
        identity: JSON values that determine the row; the name of the file contains 8 hex digits of their hash.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    return folder / f"{folder_name(f'{name}-{dataset}'.replace('/', '-'))}-{digest}.json"


def write_row(row: Row, file: Path) -> None:
    """Write a row to its file."""
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda stream: stream.write(json.dumps(asdict(row), indent=1).encode() + b"\n"))


def read_rows(folder: Path) -> list[Row]:
    """Read all rows of a folder, sorted by name, test set and date.

    Raises:
        DataError: if a file is not a row.
    """
    rows = [read_row(file) for file in sorted(folder.glob("*.json"))]
    return sorted(rows, key=lambda row: (row.name, row.dataset, row.date))


def read_row(file: Path) -> Row:
    """Read a row from its file.

    Raises:
        DataError: if the file is not a row.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        row = Row(**content)
        if row.format != FORMAT or not row.measured:
            raise ValueError(f"format {row.format}, expected {FORMAT} with measured values")
        for name, values in row.measured.items():
            if name not in METRICS or not 0 <= values["value"] <= 100:
                raise ValueError(f"measured {name}: {values}")
        if row.difference != difference(row.measured, row.published):
            raise ValueError(f"difference {row.difference} is not that of measured and published")
        _cells(row)
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(
            f"{file}: not a row of `fastamp reproduce`: {error}\n  fix: write it again, or remove the file"
        ) from error
    return row


def row_table(rows: Sequence[Row]) -> tuple[list[list[str]], list[str]]:
    """Return the cells of a table of rows, and its headers."""
    headers = ["model", "test set", "published mAP / Rank-1", "measured mAP", "measured Rank-1", "difference", "images"]
    return [_cells(row) for row in rows], [*headers, "measured with"]


def _cells(row: Row) -> list[str]:
    first = row.published[0] if row.published else {}
    published = " / ".join("-" if first.get(key) is None else f"{first[key]:.1f}" for key in ("mAP", "rank1"))
    data = row.data[f"{row.dataset} gallery"]
    images = f"{data['folder']}, {data['names']}" + ("" if has_published_counts(row.data) else ": unknown")
    how = f"training with {plural(len(row.seeds), 'seed')}" if row.seeds else "published file"
    return [
        row.name,
        f"{row.dataset}; {first['protocol']}" if first.get("protocol") else row.dataset,
        f"{published} ({first['source']})" if first.get("source") else published,
        _with_interval(row.measured.get("mAP")),
        _with_interval(row.measured.get("Rank-1")),
        " / ".join(f"{row.difference[name]:+.1f}" if name in row.difference else "-" for name in ("mAP", "Rank-1")),
        images,
        f"{how}; fastamp {row.versions.get('fastamp', '?')}, PyTorch {row.versions.get('torch', '?')}, "
        f"{row.hardware.get('device', '?')}, {row.seconds:.0f} s, {row.peak_memory_mib:.0f} MiB",
    ]


def _with_interval(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "-"
    return f"{values['value']:.1f}" + (f" ({values['low']:.1f} to {values['high']:.1f})" if "low" in values else "")
