"""Check datasets for unreadable images, conflicting labels, duplicates across splits and queries without a match."""

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import faiss
import numpy as np
from PIL import Image, ImageDraw, ImageOps

from fastamp.data.datasets.base import ImageDataset, ImageItem, count_items
from fastamp.data.decode import LARGEST_PIXELS, MAX_PIXELS, check_pixels, open_with_pil, read_image
from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError
from fastamp.utils.files import check_not_device
from fastamp.utils.progress import track

SPLITS = ("train", "query", "gallery")
# Difference hash of 256 bits: each compares neighboring cells of a 16 x 17 grid. Measured on the demo dataset: resized
# and recompressed copies differ in 8 to 27 bits (medians; at most 39), different images in at least 49.
_HASH_SIDE, _NEAR_DUPLICATE_BITS = 16, 30
_MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Finding:
    """Problem found in a dataset.

    Attributes:
        fault (str): short description of the problem.
        examples (list[str]): the first occurrences, one line each.
        count (int): number of occurrences.
        is_error (bool): True if the problem makes results wrong, False for a warning.
    """

    fault: str
    examples: list[str]
    count: int
    is_error: bool = True


@dataclass
class Report:
    """Result of ``check_dataset``.

    Attributes:
        rows (list): ``(split, images, identities, cameras)`` for each split that is not empty; the last three are
            counts.
        findings (list[Finding]): problems, errors first.
        sizes (Counter): (width, height) -> number of images.
    """

    rows: list[tuple[str, int, int, int]]
    findings: list[Finding] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def has_errors(self) -> bool:
        """True if at least one finding is an error."""
        return any(finding.is_error for finding in self.findings)


@dataclass(frozen=True)
class _ImageSummary:
    """Size, digest and perceptual hash of an image, or the reason why it cannot be read."""

    fault: str = ""
    size: tuple[int, int] = (0, 0)
    digest: bytes = b""
    hash_bits: np.ndarray | None = None


def check_dataset(dataset: ImageDataset, *, max_pixels: int = MAX_PIXELS) -> Report:
    """Read every image in a dataset and check the labels and splits.

    Args:
        dataset (ImageDataset): dataset to check.
        max_pixels (int): maximum width x height of an image; larger images are reported as unreadable. Default
            100,000,000.

    Returns:
        Report: image counts, image sizes and findings.

    Raises:
        DataError: if the images of a split cannot be listed.
    """
    splits = {split: items for split in SPLITS if (items := getattr(dataset, split))}
    report = Report([(split, *count_items(items)) for split, items in splits.items()])
    images = {(item.path, item.box): item for items in splits.values() for item in items}
    with ThreadPoolExecutor(available_cores()) as pool:
        inspected = track(
            pool.map(partial(_inspect_image, max_pixels=max_pixels), images.values()), len(images), "reading images"
        )
        summaries = dict(zip(images, inspected, strict=True))
    report.sizes.update(each.size for each in summaries.values() if not each.fault)
    report.findings += [
        *_find_unreadable(summaries),
        *_find_shared_identities(dataset, splits),
        *_find_unmatched_queries(splits.get("query", []), splits.get("gallery", [])),
        *_find_duplicates(splits, summaries),
        *_find_conflicting_labels(splits, summaries),
        *_find_rare_identities(splits.get("train", [])),
    ]
    report.findings.sort(key=lambda finding: not finding.is_error)
    return report


def contact_sheet(dataset: ImageDataset, path: Path, *, identities: int = 8, columns: int = 12, seed: int = 0) -> None:
    """Write a PNG with sample images, one row per identity: training identities, then query identities.

    Each query row shows the query images of an identity, framed in blue, and then the gallery images of this identity.

    Args:
        dataset (ImageDataset): dataset that contains the images.
        path (Path): PNG file to write.
        identities (int): maximum number of rows for training identities, and for query identities. Default 8.
        columns (int): images per row. Default 12.
        seed (int): seed of the random choice of identities. Default 0.

    Raises:
        OSError: if the file cannot be written.
    """
    width, height, gap, line = 64, 128, 4, 14
    train, query, gallery = (_by_identity(getattr(dataset, split)) for split in SPLITS)
    rng = np.random.default_rng(seed)
    rows: list[tuple[str, list[ImageItem], int]] = []
    for title, groups in (("training", train), ("queries, gallery", query)):
        names = list(groups)
        for number in rng.permutation(len(names))[:identities].tolist():
            name = names[number]
            matches = gallery.get(name, []) if groups is query else []
            framed = len(groups[name][: columns // 3]) if groups is query else 0
            items = [*groups[name][: framed or columns], *matches][:columns]
            rows.append((f"{title}: {dataset.identity(name)}", items, framed))
    step = height + line + gap
    sheet = Image.new("RGB", (columns * (width + gap) + gap, max(1, len(rows)) * step + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (title, items, framed) in enumerate(rows):
        draw.text((gap, gap + row * step), title, fill="black")
        for column, item in enumerate(items):
            try:
                pixels = read_image(item.path, box=item.box, max_pixels=LARGEST_PIXELS, least_side=2 * height)
                pixels = pixels.permute(1, 2, 0).numpy()
            except DataError:
                continue  # reported as a finding
            corner = (gap + column * (width + gap), gap + line + row * step)
            picture = ImageOps.contain(Image.fromarray(pixels), (width, height))
            sheet.paste(picture, corner)
            if column < framed:
                end = (corner[0] + picture.width + 1, corner[1] + picture.height + 1)
                draw.rectangle(((corner[0] - 2, corner[1] - 2), end), outline="blue", width=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _by_identity(items: Sequence[ImageItem]) -> dict[int | str, list[ImageItem]]:
    groups: dict[int | str, list[ImageItem]] = defaultdict(list)
    for item in items:
        groups[item.pid].append(item)
    return groups


def _inspect_image(item: ImageItem, *, max_pixels: int = MAX_PIXELS) -> _ImageSummary:
    try:
        check_not_device(item.path)
        content = Path(item.path).read_bytes()
        with open_with_pil(io.BytesIO(content)) as image:
            check_pixels(item.path, *image.size, max_pixels)
            image.load()  # decode all of it: unlike other decoders, PIL raises on truncated files
            upright = ImageOps.exif_transpose(image)
    except Exception as error:  # PIL's plugins raise many exception types on corrupt files
        return _ImageSummary(fault=(str(error).strip() or type(error).__name__).splitlines()[0])
    if item.box is not None:
        if item.box[2] > upright.width or item.box[3] > upright.height:
            return _ImageSummary(fault=f"box {item.box} exceeds the image of {upright.width} x {upright.height} pixels")
        upright = upright.crop(item.box)
    if upright.mode.startswith(("I", "F")):  # more than 8 bits
        values = np.asarray(upright, dtype=np.float64)
        upright = Image.fromarray((255 * (values - values.min()) / max(np.ptp(values), 1e-9)).astype(np.uint8))
    gray = np.asarray(upright.convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Image.Resampling.BOX))
    digest = hashlib.blake2b(content + str(item.box).encode(), digest_size=16).digest()
    return _ImageSummary(size=upright.size, digest=digest, hash_bits=np.packbits(gray[:, 1:] > gray[:, :-1]))


def _find_unreadable(summaries: dict) -> Iterable[Finding]:
    faults = [f"{path}: {each.fault}" for (path, _), each in summaries.items() if each.fault]
    return _findings("unreadable images", faults)


def _find_shared_identities(dataset: ImageDataset, splits: dict[str, list[ImageItem]]) -> Iterable[Finding]:
    names = {split: {dataset.identity(item.pid) for item in items} for split, items in splits.items()}
    tested = names.get("query", set()) | names.get("gallery", set())
    return _findings(
        "identities in both training and test",
        sorted(names.get("train", set()) & (tested - {"0", "-1"})),
    )


def _find_unmatched_queries(query: Sequence[ImageItem], gallery: Sequence[ImageItem]) -> Iterable[Finding]:
    cameras: dict[int | str, set[int | str]] = defaultdict(set)
    for item in gallery:
        cameras[item.pid].add(item.camid)
    unmatched = [item.path for item in query if not cameras[item.pid]]
    same = [item.path for item in query if cameras[item.pid] and cameras[item.pid] <= {item.camid}]
    yield from _findings("queries without a gallery image of their identity", unmatched)
    yield from _findings("queries whose only matches are from the same camera", same)


def _find_duplicates(splits: dict[str, list[ImageItem]], summaries: dict) -> Iterable[Finding]:
    """Find exact copies and near-duplicates that are in different splits."""
    for number, first in enumerate(SPLITS):
        for second in SPLITS[number + 1 :]:
            first_items = [item for item in splits.get(first, []) if not summaries[item.path, item.box].fault]
            second_items = [item for item in splits.get(second, []) if not summaries[item.path, item.box].fault]
            if not first_items or not second_items:
                continue
            by_digest = {summaries[item.path, item.box].digest: item for item in first_items}
            same = [
                f"{by_digest[digest].path} = {item.path}"
                for item in second_items
                if (digest := summaries[item.path, item.box].digest) in by_digest
            ]
            yield from _findings(f"images in both {first} and {second}", same)
            yield from _findings(
                f"near-duplicates between {first} and {second}",
                list(_find_near_duplicates(first_items, second_items, summaries)),
                is_error=False,
            )


def _find_conflicting_labels(splits: dict[str, list[ImageItem]], summaries: dict) -> Iterable[Finding]:
    """Find images that a split lists under several identities, or more than once under the same identity."""
    for split, items in splits.items():
        by_digest: dict[bytes, list[ImageItem]] = defaultdict(list)
        for item in items:
            each = summaries[item.path, item.box]
            by_digest[each.digest or f"{item.path}{item.box}".encode()].append(item)
        copies = [same for same in by_digest.values() if len(same) > 1]
        two = [same for same in copies if len({item.pid for item in same}) > 1]
        lines = [" = ".join(f"{item.path} ({item.pid})" for item in same[:3]) for same in two]
        yield from _findings(f"images of {split} listed under several identities", lines)
        rest = [same for same in copies if same not in two]
        lines = [" = ".join(item.path for item in same[:3]) for same in rest]
        yield from _findings(f"images of {split} listed more than once", lines, is_error=False)


def _find_near_duplicates(
    first_items: Sequence[ImageItem], second_items: Sequence[ImageItem], summaries: dict
) -> Iterable[str]:
    index = faiss.IndexBinaryFlat(8 * len(summaries[first_items[0].path, first_items[0].box].hash_bits))
    index.add(np.stack([summaries[item.path, item.box].hash_bits for item in first_items]))
    distances, nearest = index.search(np.stack([summaries[item.path, item.box].hash_bits for item in second_items]), 1)
    for item, distance, number in zip(second_items, distances[:, 0], nearest[:, 0], strict=True):
        nearest_item = first_items[number]
        is_copy = summaries[item.path, item.box].digest == summaries[nearest_item.path, nearest_item.box].digest
        # Adjacent frames of one camera are excluded from the evaluation: SAME_CAMERA in fastamp.evaluation.protocol.
        is_junk = nearest_item.pid == item.pid and nearest_item.camid == item.camid
        if distance <= _NEAR_DUPLICATE_BITS and not is_copy and not is_junk:
            yield f"{nearest_item.path} ~ {item.path}"


def _find_rare_identities(train: Sequence[ImageItem]) -> Iterable[Finding]:
    counts = Counter(item.pid for item in train)
    if train and len(counts) == 1:
        yield from _findings("only one training identity", [str(next(iter(counts)))])
    singles = [str(pid) for pid, count in counts.items() if count == 1]
    yield from _findings("identities with a single training image", singles, is_error=False)


def _findings(fault: str, examples: list[str], *, is_error: bool = True) -> Iterable[Finding]:
    if examples:
        yield Finding(fault, examples[:_MAX_EXAMPLES], len(examples), is_error)
