"""Checks that a test set can be evaluated, by its labels and columns, without features."""

from collections.abc import Iterable, Iterator

import numpy as np

from fastamp.evaluation.identities import CAMERA, JUNK_PID, SAME_CAMERA, Identities, Matches
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.ranking_rule import RankingRule
from fastamp.utils.errors import DataError, NoMatchError, did_you_mean


def check_evaluable(identities: Identities, protocol: Protocol) -> None:
    """Check that a test set can be evaluated.

    Args:
        identities: identities, cameras and columns of the query and gallery images.
        protocol: evaluation protocol.

    Raises:
        DataError: if there are no queries or, unless the rule ranks all images, no gallery images; if a column is
            missing; or if the rule cannot rank these images, see ``RankingRule.check``.
        NoMatchError: if no query has a match.
    """
    check_columns(identities.columns, protocol)
    sides = {"query": identities.query_pids, "gallery": identities.gallery_pids}
    for name, pids in sides.items():
        if not len(pids) and (name == "query" or not protocol.rule.all_images):
            raise DataError(
                f"the {name} set is empty: at least one image is required.\n"
                f"  fix: choose a test set or file that contains {name} images"
            )
    protocol.rule.check(identities)
    if not any(counts.any() for counts in count_matches(identities, protocol.rule)):
        raise no_match_error(identities, protocol.rule)


def check_columns(available: Iterable[str], protocol: Protocol) -> None:
    """Check that each column that the evaluation needs is available.

    Raises:
        DataError: if a column is missing; the message lists the available columns.
    """
    names = sorted(available)
    for name, needed_by in protocol.columns.items():
        if name not in names:
            usable = [CAMERA, *names] if name == protocol.group_by else names
            fix = protocol.rule.column_fix(name) if name in protocol.rule.columns else "change TEST.GROUP_BY"
            raise DataError(
                f"{needed_by} needs the column {name!r} with one number or text for each image, which the test set "
                f"does not have.{did_you_mean(name, usable)}\n"
                f"  available columns: {', '.join(usable) or 'none'}\n"
                f"  fix: add the column to the test set, or {fix}"
            )


def count_matches(identities: Identities, rule: RankingRule) -> Iterator[np.ndarray]:
    """Count the matches of each query, in blocks of queries.

    Args:
        identities: identities, cameras and columns of the test set.
        rule: ranking rule.

    Yields:
        (B,) int64, number of matches of the next queries; of all images, if the rule ranks all images.
    """
    matches = Matches(rule.arrange(identities), junk=rule.junk, unmatched_pid=JUNK_PID if rule.trapezoid else None)
    for first, last in matches.spans(0, len(matches.query_pids)):
        yield np.bincount(matches.pairs(first, last).rows, minlength=last - first)


def no_match_error(identities: Identities, rule: RankingRule) -> NoMatchError:
    """Build the error for a test set in which no query has a match."""
    fix = "give the images of an identity the same name or number in query and gallery"
    if rule.all_images:
        count = len(identities.query_pids) + len(identities.gallery_pids)
        return NoMatchError(f"none of the {count} images has a match: each identity has only one image.\n  fix: {fix}")
    sides = [set(pids.tolist()) for pids in (identities.query_pids, identities.gallery_pids)]
    common = sides[0] & sides[1] - ({JUNK_PID} if rule.trapezoid else set())
    none = f"none of the {len(identities.query_pids)} queries has a match in the gallery"
    if not common:
        return NoMatchError(
            f"{none}: query and gallery have no identity in common (query: {len(sides[0])}, gallery: "
            f"{len(sides[1])}).\n  fix: {fix}"
        )
    if rule.junk is not SAME_CAMERA:
        return NoMatchError(
            f"{none}: the rule of TEST.PROTOCOL={rule.name} excludes all images of the {len(common)} common "
            "identities as junk.\n  fix: check the test set and the junk of this rule"
        )
    return NoMatchError(
        f"{none} (the same identity from another camera): the gallery images of each of the {len(common)} common "
        "identities are from the camera of the query.\n"
        "  fix: add gallery images from other cameras; or, if cameras do not matter, set TEST.PROTOCOL to no_camera"
    )
