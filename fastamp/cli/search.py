"""Search a gallery for the images that are most similar to query images.

The gallery is a folder of images, an extraction (.npz), an index file, or a mutable gallery (`fastamp gallery`);
--camera and --identity limit it, and --after and --before limit a mutable gallery. The features of more than 200 images
in a folder are extracted to a file next to it, which later searches use; more than 50,000 features get an index. With a
calibrated model (`fastamp calibrate`), the identity of a query is unknown if its best match is below the threshold, and
each result has the probability of the same identity at a prior of 0.5.

With a model of attributes, --attributes searches only the images with these attributes; without a query image, all
images are ranked by the product of the probabilities. A term such as "red upper" has words of the name of an attribute.

examples:
  fastamp search logs/run/model_best.pth query.jpg --gallery photos/
  fastamp search logs/run query.jpg --gallery gallery.npz
  fastamp search logs/run/model_best.pth queries/ --gallery gallery.index --top 20 --json
  fastamp search logs/run query.jpg --gallery people.gallery --camera entrance --after 2026-01-31T08:00
  fastamp search logs/run --gallery photos/ --attributes "red upper, hat"
"""

import argparse
import itertools
import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fastamp.cli.model_arguments import EXPORTED_HELP, add_camera_view_arguments, add_model_arguments, model_of
from fastamp.cli.options import is_key, split_key_values
from fastamp.config import get_cfg
from fastamp.config.plugin_tables import read_tables
from fastamp.utils.choices import EF_SEARCH, PROBED
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.table import format_table

if TYPE_CHECKING:
    from fastamp.retrieval.gallery import Conditions
    from fastamp.retrieval.search import SearchResult

# Keys of the rows of results; a column of the gallery with such a name has another key.
_OWN_KEYS = ("rank", "score", "probability", "path", "pid", "camid")
_TERM = "term "
"""Prefix of the search terms among the arguments."""
_PLURALS = {"camera": "cameras", "identity": "identities"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add_model_arguments(parser, EXPORTED_HELP)
    parser.add_argument("queries", nargs="*", metavar="QUERY", help="images or folders of images, then KEY VALUE")
    parser.add_argument(
        "--gallery",
        required=True,
        metavar="GALLERY",
        help="folder of images, .npz output of `fastamp extract`, an index file, or a mutable gallery",
    )
    parser.add_argument(
        "--index", metavar="FILE", help="index file to build or load (default: GALLERY with the suffix .index)"
    )
    parser.add_argument(
        "--kind",
        default="auto",
        metavar="KIND",
        help="kind of a new index: flat, ivf, hnsw, ivfpq, or that of a plugin (default: auto, by the number of "
        "features)",
    )
    parser.add_argument("--top", "-k", type=int, default=10, help="number of results per query (default: %(default)s)")
    parser.add_argument(
        "--effort",
        type=int,
        metavar="N",
        help=f"number of lists to search (ivf; default: {100 * PROBED:g} %% of the lists) or efSearch (hnsw; default: "
        f"{EF_SEARCH}); larger values increase recall and time",
    )
    add_camera_view_arguments(parser)
    parser.add_argument(
        "--group-by",
        metavar="COLUMN",
        help="group the results by identity, camera or a further column of the gallery, the best group first",
    )
    for name in ("camera", "identity"):
        parser.add_argument(f"--{name}", nargs="+", metavar="NAME", help=f"search only these {_PLURALS[name]}")
    parser.add_argument("--after", metavar="TIME", help="search only images from this time, ISO 8601, UTC (mutable)")
    parser.add_argument("--before", metavar="TIME", help="search only images before this time (mutable)")
    parser.add_argument("--exact", action="store_true", help="exact search instead of the index")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    terms = read_tables("SEARCH_TERMS")
    parser.set_defaults(terms=terms)
    for name, term in terms.items():
        try:
            parser.add_argument(f"--{name}", dest=_TERM + name, metavar="TEXT", help=term.help)
        except argparse.ArgumentError as error:
            raise ConfigError(
                f"{term.file}: SEARCH_TERMS: --{name} is an option of fastamp search.\n  fix: rename it"
            ) from error


def run(args: argparse.Namespace) -> int:
    """Search and print the results."""
    from fastamp.inference.image_folder import open_source
    from fastamp.inference.image_list import image_paths
    from fastamp.retrieval.columns import has_missing_integers, is_unknown
    from fastamp.retrieval.open_gallery import check_gallery, has_features, open_gallery

    names = list(itertools.takewhile(lambda word: not _is_known_key(word), args.queries))
    texts = {name: text for name in args.terms if (text := vars(args)[_TERM + name])}
    if not names and not texts:
        restriction = f", only {' '.join(args.queries)}" if args.queries else ""
        options = "".join(f", or --{name}" for name in args.terms)
        raise ConfigError(f"no query image{restriction}.\n  fix: add an image or a folder{options}")
    queries = image_paths(names)
    path, conditions = check_gallery(args.gallery), _conditions(args)
    how = {"index": args.index, "kind": args.kind}
    get_cfg(args.plugin)  # registers the kinds of indices of a plugin
    # Before the model is loaded, unless it has to extract the features of a folder of images.
    gallery = open_gallery(path, **how) if args.group_by and has_features(path) else None
    group_by = None if gallery is None else _group_key(args.group_by, gallery.columns)
    model = model_of(args, split_key_values(args.queries[len(names) :]))
    terms = [args.terms[name].load().from_model(text, model) for name, text in texts.items()]
    features = None
    if queries:  # an unreadable one is an error before the features of the gallery are extracted
        features = model.require_features(queries, camids=args.camids, viewids=args.viewids, modality=args.modality)
    if gallery is None:
        gallery = open_source(path, model, **how)
        group_by = _group_key(args.group_by, gallery.columns) if args.group_by else None
    limits = {"effort": args.effort, "exact": args.exact, "terms": terms, "conditions": conditions}
    result = model.search(None, gallery, args.top, features=features, **limits)
    queries = queries or [", ".join(texts.values())]
    shown = {group_by}.union(*(term.columns() for term in terms))
    has_missing = {name for name, column in gallery.columns.items() if has_missing_integers(column)}
    groups = [_grouped(_rows(result, number, shown, has_missing), group_by) for number in range(len(queries))]
    if args.json:
        decided = result.decision
        decisions = [{} if decided is None else decided.of_query(number) for number in range(len(queries))]
        parts = zip(queries, decisions, groups, strict=True)
        print(json.dumps([{"query": query, **decision, "found": rows} for query, decision, rows in parts]))
        return 0
    labels = {"identities": result.images.pids, "cameras": result.images.camera_names}
    unknown = [name for name, values in labels.items() if is_unknown(values)]
    note = f"; {' and '.join(unknown)} unknown" if unknown else ""
    for number, (query, rows) in enumerate(zip(queries, groups, strict=True)):
        print(f"{query} ({result.metric} {_score_name(result.metric)}{note})")
        if result.decision is not None:
            print(_describe_decision(result.decision.of_query(number), result))
        if not rows:
            print("no images in the gallery, or none that meets the conditions")
        for value, group in itertools.groupby(rows, key=lambda row: row.get(group_by or "")):
            if group_by:
                print(f"{args.group_by} {'unknown' if value is None else value}:")
            print(_table(list(group)))
    return 0


def _is_known_key(word: str) -> bool:
    """Return True for a config key; an image that is not found may be spelled as one: IMG_1.JPG."""

    return is_key(word) and re.split("[.=]", word)[0] in get_cfg()


def _conditions(args: argparse.Namespace) -> "Conditions":
    from fastamp.retrieval.gallery import Conditions
    from fastamp.retrieval.gallery_store import parse_time

    times = {name: parse_time(text) for name in ("after", "before") if (text := vars(args)[name])}
    return Conditions(args.camera or (), args.identity or (), **times)


def _score_name(metric: str) -> str:
    return {"cosine": "similarity", "euclidean": "distance"}.get(metric, "probability")  # that of search terms


def _describe_decision(decision: Mapping[str, Any], result: "SearchResult") -> str:
    is_cosine = result.metric == "cosine"
    if decision["decision"] == "match":
        side = "at least" if is_cosine else "at most"
    else:
        side = "below" if is_cosine else "above"
    return (
        f"{decision['decision']}: the best {_score_name(result.metric)} is {side} {decision['threshold']:.4f} "
        f"(expected false-positive identification rate {100 * decision['fpir']:.3g} % with {result.searched:,} "
        "gallery images)"
    )


def _group_key(name: str, columns: Mapping[str, Any]) -> str:
    """Return the key of the results' rows for an argument of ``--group-by``.

    Raises:
        ConfigError: if the gallery has no such column; the message lists the available columns.
    """
    keys = {"identity": "pid", "camera": "camera"} | {column: _column_key(column) for column in columns}
    if name in keys:
        return keys[name]
    raise ConfigError(
        f"--group-by: the gallery has no column {name!r}; available: {', '.join(keys)}.{did_you_mean(name, keys)}\n"
        "  fix: choose one of these, or extract the features again from a dataset with this column"
    )


def _column_key(name: str) -> str:
    """Return the key of the results' rows for a column of the gallery."""
    return f"column.{name}" if name in _OWN_KEYS else name


def _grouped(rows: list[dict[str, Any]], key: str | None) -> list[dict[str, Any]]:
    """Order the rows by groups with equal values of ``key``: groups by their best row, rows by rank."""
    if key is None:
        return rows
    first: dict[Any, int] = {}
    for row in rows:
        row.setdefault(key, row.get("camid"))  # cameras without names
        first.setdefault(_hashable(row[key]), row["rank"])
    return sorted(rows, key=lambda row: (first[_hashable(row[key])], row["rank"]))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _table(rows: list[dict[str, Any]]) -> str:
    """Format rows as a table, without unknown columns, and without numbers of cameras that have names."""
    omitted = {name for name in rows[0] if all(row[name] is None for row in rows)}
    omitted |= {"camid"} if "camera" in rows[0] else set()
    headers = [name for name in rows[0] if name not in omitted]
    return format_table([[row[name] for name in headers] for row in rows], headers, floatfmt=".4f")


def _rows(
    result: "SearchResult", query: int, shown: Collection[str | None] = (), has_missing: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Convert the search results of one query to dicts of plain values; unknown and missing values are None.

    Values of the model's outputs are omitted, except those of the columns ``shown``. ``has_missing`` names the columns
    in which -1 is a missing value.
    """
    from fastamp.retrieval.columns import VALUE_PREFIX
    from fastamp.utils.missing import MISSING

    columns, images = {"score": result.scores}, result.images
    if result.decision is not None:
        columns["probability"] = result.decision.probabilities
    columns |= {"path": images.paths, "pid": images.pids, "camid": images.camids}
    if images.cameras is not None:
        columns["camera"] = images.cameras
    if images.boxes is not None:
        columns["box"] = images.boxes
    column_keys = {
        name: f"column.{name}" if name in columns else _column_key(name)
        for name in images.further
        if name in shown or not name.startswith(VALUE_PREFIX)
    }
    columns |= {key: images.further[name] for name, key in column_keys.items()}
    values = {name: column[query].tolist() for name, column in columns.items()}
    for name in ("pid", "camid", *(column_keys[name] for name in has_missing if name in column_keys)):
        values[name] = [None if value == MISSING else value for value in values[name]]
    for name in column_keys.values():
        values[name] = [None if value == "" or value != value else value for value in values[name]]
    return [
        {"rank": rank, **dict(zip(values, row, strict=True))}
        for rank, row in enumerate(zip(*values.values(), strict=True), start=1)
    ]
