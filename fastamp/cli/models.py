"""List published weights by name, or describe one with its license and its traps.

A name, or a part of it that no other name has, is a SOURCE of other commands: the file is downloaded at the first use,
to FASTAMP_ZOO or ~/.cache/fastamp/zoo. The figures are those that the authors published.

examples:
  fastamp models
  fastamp models market1501
  fastamp models osnet_x1_0_msmt17
  fastamp extract osnet_x1_0_msmt17 photos/ -o features.npz
"""

import argparse
import re
from typing import TYPE_CHECKING, Any

from fastamp.utils.plural import mebibytes

if TYPE_CHECKING:
    from fastamp.zoo import Entry

_COLUMNS = (
    "name",
    "backbone",
    "size",
    "trained on",
    "mAP",
    "Rank-1",
    "test set, source",
    "license",
    "commercial use",
    "at",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument(
        "filter",
        nargs="?",
        default="",
        metavar="FILTER",
        help="name or unique part of a name, to describe one; else text in the name, backbone, program or data",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table of the entries that match, or all facts of one.

    Raises:
        ConfigError: if no entry matches.
    """
    from fastamp.utils.table import format_table
    from fastamp.zoo import PREFIX, find, list_entries, matches

    named = matches(args.filter)
    if len(named) == 1:
        print(describe(named[0]))
        return 0
    text = args.filter.removeprefix(PREFIX).lower()
    chosen = [entry for entry in list_entries() if text in _searched(entry)] or named
    if not chosen:
        find(args.filter)  # raises an error with the nearest name
    ranked = sorted(chosen, key=lambda entry: entry.rank or len(chosen) + 25)
    print(format_table([_row(entry) for entry in ranked], _COLUMNS))
    print(f"{len(chosen)} entries; facts of one: fastamp models NAME")
    return 0


def _searched(entry: "Entry") -> str:
    return "\n".join((entry.name, entry.backbone, entry.program, entry.training_data, entry.host)).lower()


def _row(entry: "Entry") -> list[str]:
    result = entry.results[0] if entry.results else {}
    trained = f"{entry.training_data} (withdrawn)" if entry.withdrawn else entry.training_data or "not stated"
    return [
        entry.name,
        entry.backbone,
        size_of(entry),
        trained,
        *(str(result.get(name, "")) for name in ("mAP", "rank1")),
        ", ".join(str(result[name]) for name in ("test_set", "source") if name in result),
        license_of(entry),
        entry.commercial_use,
        f"{entry.host}{' (by hand)' if entry.page and not entry.mirrors else ''}",
    ]


def size_of(entry: "Entry") -> str:
    """Return the published size of the file, e.g. "94.1 MiB"; "about" as others state it."""
    if entry.size:
        return mebibytes(entry.size)
    stated = re.search(r"([\d.]+) (MB|GB) \(", entry.size_note)
    return f"about {float(stated[1]) * _BYTES[stated[2]] / 2**20:.0f} MiB" if stated else "not stated"


def _page_note(entry: "Entry") -> str:
    note = "the mirror is used" if entry.mirrors else "download by hand"
    return f" (a web page: {note})" if entry.page else ""


def license_of(entry: "Entry") -> str:
    """Return the license of the weights; if it is not stated, also that of the code."""
    return entry.license or f"not stated{f' (code: {entry.license_code})' if entry.license_code else ''}"


def describe(entry: "Entry") -> str:
    """Describe an entry: all facts with their source, and how to use it."""
    from fastamp.zoo import path_of

    height_width = " x ".join(map(str, entry.input_size))
    facts: dict[str, Any] = {
        "program": f"{entry.program}, https://github.com/{entry.repository} at {entry.commit}"
        if entry.repository
        else entry.program,
        "task": {"reid": "re-identification", "backbone": "pretrained weights of a backbone"}.get(
            entry.task, entry.task
        ),
        "backbone": entry.backbone,
        "input (height x width)": height_width,
        "feature": f"{entry.embedding_dim or '?'} values; {entry.neck or 'neck not stated'}",
        "pooling": entry.pooling,
        "classes": entry.classes,
        "cameras and views in the model": ", ".join(f"{name} {value:g}" for name, value in entry.sie.items()),
        "mean, std": f"{list(entry.mean)}, {list(entry.std)} of {entry.channels} in 0..1" if entry.mean else "",
        "resize in training, in evaluation": ", ".join(entry.interpolation),
        "trained on": entry.training_data,
        "pretrained on": entry.pretraining,
        "withdrawn": "the owner withdrew these images in 2019; use requires --accept-withdrawn"
        if entry.withdrawn
        else "",
        "license of the weights": license_of(entry),
        "commercial use": f"{entry.commercial_use}; the terms of the training images apply as well",
        "address": f"{entry.url}{_page_note(entry)}",
        "mirrors": ", ".join(entry.mirrors),
        "size": size_of(entry),
        "SHA-256": entry.sha256 or (f"{entry.hash_suffix}..." if entry.hash_suffix else "not published"),
        "file here": f"{path_of(entry)}{'' if path_of(entry).exists() else ' (missing)'}",
        "first linked": entry.published,
        "paper": entry.paper,
        "names of tensors": entry.layout,
        "read by fastamp": f"{entry.loads}, concluded from source code; the file was not tried",
        "recipe": entry.recipe or "none",
        "config keys": ", ".join(f"{key} {value}" for key, value in entry.model_keys().items()) if entry.recipe else "",
        "note": entry.note,
    }
    width = max(map(len, facts))
    lines = [entry.name, *(f"  {name:<{width}}  {value}" for name, value in facts.items() if value not in ("", None))]
    for result in entry.results:
        shown = ", ".join(f"{name} {result[key]}" for name, key in _FIGURES.items() if key in result)
        source = f"{result.get('protocol', 'protocol not stated')}; {result.get('source', 'source not stated')}"
        lines.append(f"  published on {result.get('test_set', 'an unnamed set')}: {shown or 'no figure'} ({source})")
    lines += [f"  trap: {trap}" for trap in entry.traps]
    return "\n".join(lines)


_BYTES = {"MB": 1e6, "GB": 1e9}
_FIGURES = {"mAP": "mAP", "Rank-1": "rank1", "mINP": "mINP"}
