"""Video re-identification: frames of tracklets, the training sampler and the batches of a test set."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.columns import check_column
from fastamp.data.dataset import ReidDataset
from fastamp.data.samplers import SAMPLER_REGISTRY, InferenceSampler, NaiveIdentitySampler, SampleKey
from fastamp.utils.errors import DataError
from fastamp.utils.plural import plural
from fastamp.utils.tracklets import frames_by_tracklet, number_tracklets

KEYS = (
    Key(
        "DATALOADER.TRACKLET.FRAMES",
        4,
        "TrackletSampler: frames per tracklet in a training batch. SOLVER.IMS_PER_BATCH counts frames: identities x "
        "DATALOADER.NUM_INSTANCE tracklets x DATALOADER.TRACKLET.FRAMES.",
        low=1,
    ),
    Key(
        "DATALOADER.TRACKLET.SAMPLING",
        "restricted",
        "TrackletSampler: frames of a tracklet: restricted (one random frame from each of T equal parts), random (T "
        "random frames in temporal order), even (every n/T-th frame), or stride (every STRIDE-th frame from a random "
        "one on).",
        choices=("restricted", "random", "even", "stride"),
    ),
    Key(
        "DATALOADER.TRACKLET.STRIDE",
        4,
        "TrackletSampler with SAMPLING stride: distance of the frames. Shorter tracklets are sampled as with "
        "restricted.",
        low=1,
    ),
    Key(
        "DATALOADER.TRACKLET.CLIP",
        0,
        "TrackletSampler: divide each tracklet into clips of this many frames, each of which is sampled like a "
        "tracklet; the last clip also contains the remaining frames. 0 does not divide tracklets.",
        low=0,
    ),
    Key(
        "TEST.TRACKLET.FRAMES",
        0,
        "Evenly spaced frames per tracklet of a test set with the column tracklet; 0 uses all frames.",
        low=0,
    ),
)

COLUMN = "tracklet"


def even_frames(count: int, frames: int) -> np.ndarray:
    """Select evenly spaced frames of a tracklet, as torchreid does.

    The last ``count % frames`` frames are dropped, and every ``count // frames``-th of the others is selected. With
    fewer than ``frames`` frames, all are selected and the last one is repeated.

    Args:
        count: frames in the tracklet, at least 1.
        frames: frames to select.

    Returns:
        (frames,) int64 indices in 0..count-1, ascending.
    """
    positions: np.ndarray = np.arange(frames) * max(1, count // frames)
    return positions.clip(max=count - 1)


def random_frames(count: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    """Select random frames of a tracklet in temporal order, without replacement if the tracklet has enough of them.

    Args:
        count: frames in the tracklet, at least 1.
        frames: frames to select.
        rng: random generator.

    Returns:
        (frames,) int64 indices in 0..count-1, ascending.
    """
    return np.sort(rng.choice(count, frames, replace=count < frames))


def restricted_frames(count: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    """Select one random frame from each of ``frames`` equal parts of a tracklet (Li et al. 2018, arXiv:1803.09882).

    Args:
        count: frames in the tracklet, at least 1; with fewer than ``frames``, parts share frames.
        frames: frames to select.
        rng: random generator.

    Returns:
        (frames,) int64 indices in 0..count-1, ascending.
    """
    bounds = np.arange(frames + 1) * count // frames
    return rng.integers(bounds[:-1], np.maximum(bounds[1:], bounds[:-1] + 1))


def strided_frames(count: int, frames: int, stride: int, rng: np.random.Generator) -> np.ndarray:
    """Select every ``stride``-th frame of a tracklet from a random frame on.

    As in the program of Gu et al. 2022, "Clothes-changing person re-identification with RGB modality only",
    arXiv:2204.06890: a tracklet with fewer than ``frames * stride`` frames is sampled by ``restricted_frames``, and
    one with fewer than ``frames`` by ``random_frames``.

    Args:
        count: frames in the tracklet, at least 1.
        frames: frames to select.
        stride: distance of the frames, at least 1.
        rng: random generator.

    Returns:
        (frames,) int64 indices in 0..count-1, ascending.
    """
    if count < frames * stride:
        return (restricted_frames if count >= frames else random_frames)(count, frames, rng)
    start = rng.integers(count - (frames - 1) * stride)
    return start + stride * np.arange(frames)


def divide_into_clips(count: int, length: int) -> list[range]:
    """Divide a tracklet into clips of consecutive frames; the last clip also contains the remaining frames.

    As the dense sampling of the program of Gu et al. 2022, arXiv:2204.06890, whose clips have 64 frames.

    Args:
        count: frames in the tracklet, at least 1.
        length: frames per clip; a tracklet with fewer than ``2 * length`` frames is one clip. 0: no division.

    Returns:
        Frame indices of each clip.
    """
    clips = max(1, count // length) if length else 1
    starts = [number * length for number in range(clips)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True)]


@SAMPLER_REGISTRY.register()
class TrackletSampler(NaiveIdentitySampler):
    """Draw P random identities, K tracklets of each, and T frames of each tracklet.

    Identities and tracklets are drawn as identities and images in ``NaiveIdentitySampler``: without replacement, and
    with replacement for an identity with fewer than K tracklets. The T frames of a tracklet are consecutive in the
    batch and in temporal order; one rank gets all of them. One epoch contains as many batches as the tracklets fill.

    Args:
        labels: identity of each image.
        camids: camera of each image.
        tracklets: (N,) int64 tracklet of each image; -1 for an image without a tracklet, which is a tracklet of one
            frame. The frames of a tracklet are in temporal order.
        sets: dataset of each image; tracklets of different datasets are different. Default: one dataset.
        frames: frames per tracklet, T. Default 4.
        sampling: ``"restricted"`` (default), ``"random"``, ``"even"`` or ``"stride"``; see ``restricted_frames``,
            ``random_frames``, ``even_frames`` and ``strided_frames``.
        stride: see ``strided_frames``. Default 4.
        clip: frames of the clips into which tracklets are divided, see ``divide_into_clips``; each clip is then drawn
            like a tracklet. Default 0: no division.
        options: further keyword arguments of ``IdentitySampler``; ``batch_size`` is P * K * T.

    Raises:
        ConfigError: if ``batch_size`` is not a multiple of K * T * ``world_size``.
        DataError: if there are fewer than P identities.
    """

    def __init__(
        self,
        *,
        labels: Sequence[int] | np.ndarray,
        camids: Sequence[int] | np.ndarray,
        tracklets: np.ndarray,
        sets: Sequence[int] | None = None,
        frames: int = 4,
        sampling: str = "restricted",
        stride: int = 4,
        clip: int = 0,
        **options: Any,
    ) -> None:
        whole = frames_by_tracklet(tracklet_keys(tracklets, sets))
        self.tracklets = [rows[part.start : part.stop] for rows in whole for part in divide_into_clips(len(rows), clip)]
        self.frames, self.sampling, self.stride = frames, sampling, stride
        first = [rows[0] for rows in self.tracklets]
        super().__init__(
            labels=np.asarray(labels)[first], camids=np.asarray(camids)[first], frames_per_instance=frames, **options
        )

    @classmethod
    def from_config(
        cls, cfg: CfgNode, *, sets: Sequence[int], columns: Mapping[str, np.ndarray], **images: Any
    ) -> "TrackletSampler":
        """Build the sampler from DATALOADER.TRACKLET, SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE and SEED.

        Raises:
            ConfigError: if the training set has no column ``tracklet``.
        """
        title = f"the training set ({', '.join(cfg.DATASETS.NAMES)})"
        check_column(COLUMN, columns, "DATALOADER.SAMPLER_TRAIN=TrackletSampler", title)
        return cls(
            tracklets=columns[COLUMN],
            sets=sets,
            frames=cfg.DATALOADER.TRACKLET.FRAMES,
            sampling=cfg.DATALOADER.TRACKLET.SAMPLING,
            stride=cfg.DATALOADER.TRACKLET.STRIDE,
            clip=cfg.DATALOADER.TRACKLET.CLIP,
            **cls.options_from_config(cfg, **images),
        )

    @property
    def images_per_epoch(self) -> int:
        """Number of images in an epoch, at least one batch: T frames of each tracklet."""
        return max(len(self.tracklets), self.identities_per_batch * self.num_instances) * self.frames

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = np.random.default_rng([self.seed % 2**64, epoch, 1])  # independent of the draw of the tracklets
        for tracklet in super().epoch(epoch):
            rows = self.tracklets[tracklet]
            yield from rows[self._select(len(rows), rng)].tolist()

    def _select(self, count: int, rng: np.random.Generator) -> np.ndarray:
        if self.sampling == "even":
            return even_frames(count, self.frames)
        if self.sampling == "stride":
            return strided_frames(count, self.frames, self.stride, rng)
        return (restricted_frames if self.sampling == "restricted" else random_frames)(count, self.frames, rng)


class TrackletInferenceSampler(InferenceSampler):
    """Divide a test set among the ranks and into batches without cutting a tracklet.

    Each rank gets a contiguous part with the same number of tracklets, up to one. A batch contains as many tracklets as
    fit, at least one, so that a tracklet with more than ``batch_size`` frames is one large batch.

    Args:
        tracklets: (N,) int64 tracklet of each image; the frames of a tracklet are consecutive.
        num_query: number of query images, which come first; no batch contains both query and gallery images, because a
            tracklet can be in both sets.
        batch_size: images per batch on this rank.
        rank, world_size: rank of this process and number of processes. Default 0 and 1.

    Raises:
        DataError: if there are fewer tracklets than processes.
    """

    def __init__(
        self, *, tracklets: np.ndarray, num_query: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        numbers = tracklet_keys(tracklets, (np.arange(len(tracklets)) >= num_query).astype(np.int64))
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        if len(starts) < world_size:
            raise DataError(
                f"the test set contains {plural(len(starts), 'tracklet')}, which is too few for {world_size} "
                "processes: each process requires at least one tracklet.\n"
                f"  fix: run with at most {plural(len(starts), 'process', 'processes')}"
            )
        ends = [*starts[1:], len(tracklets)]
        rows_of_rank = slice(rank * len(starts) // world_size, (rank + 1) * len(starts) // world_size)
        self.batch_size = batch_size
        self._batches: list[range] = []
        for start, end in zip(starts[rows_of_rank], ends[rows_of_rank], strict=True):
            if self._batches and start != num_query and end - self._batches[-1].start <= batch_size:
                self._batches[-1] = range(self._batches[-1].start, end)
            else:
                self._batches.append(range(start, end))
        self.indices = range(self._batches[0].start, self._batches[-1].stop)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield this rank's sample keys for each batch."""
        for batch in self._batches:
            yield [(0, index, index) for index in batch]


def tracklet_keys(tracklets: np.ndarray, sets: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
    """Number tracklets that have the same name in different datasets, or splits, differently.

    Args:
        tracklets: (N,) int64 tracklet of each image; -1 for an image without a tracklet.
        sets: (N,) dataset of each image, from 0. Default: one dataset.

    Returns:
        (N,) int64 tracklet numbers.
    """
    numbers = number_tracklets(tracklets)
    if sets is None:
        return numbers
    numbered = np.asarray(sets)
    return number_tracklets(numbers * (1 + numbered.max(initial=0)) + numbered)


def select_test_frames(tracklets: np.ndarray, frames: int, num_query: int) -> np.ndarray:
    """Select the frames of a test set to load, grouped by tracklet.

    Args:
        tracklets: (N,) int64 tracklet of each image; queries first. A tracklet in both the query and the gallery set is
            two tracklets.
        frames: frames per tracklet, see ``even_frames``; shorter tracklets are not padded. 0 selects all frames.
        num_query: number of query images.

    Returns:
        (M,) int64 rows.
    """
    in_gallery = np.arange(len(tracklets)) >= num_query
    selected = [
        rows[np.unique(even_frames(len(rows), frames))] if frames else rows
        for rows in frames_by_tracklet(tracklet_keys(tracklets, in_gallery.astype(np.int64)))
    ]
    return np.concatenate(selected)


def tracklets_of(dataset: ReidDataset, title: str, sets: Sequence[int] | np.ndarray | None = None) -> np.ndarray | None:
    """Return the column ``tracklet`` of a dataset, after checking it.

    Args:
        dataset: the dataset.
        title: names of the datasets, for messages.
        sets: see ``tracklet_keys``.

    Returns:
        (N,) int64 tracklet of each image, -1 for an image without a tracklet; None if there is no column ``tracklet``.

    Raises:
        DataError: if the column contains numbers with decimals or lists, or a tracklet has several identities or
            cameras.
    """
    column = dataset.columns.get(COLUMN)
    if column is None:
        return None
    tracklets = column.values
    if not isinstance(tracklets, np.ndarray) or tracklets.ndim != 1 or tracklets.dtype.kind != "i":
        raise DataError(f"the column {COLUMN} of {title} must be text or integers.\n  fix: correct the column")
    numbers = tracklet_keys(tracklets, sets)
    first = np.unique(numbers, return_index=True)[1][numbers]
    source = dataset.sources[0] if len(dataset.sources) == 1 else None
    for kinds, labels, names, name_of in (
        ("identities", dataset.labels, dataset.items.pids, source.identity if source else str),
        ("cameras", dataset.camids, dataset.items.camids, source.camera if source else str),
    ):
        wrong = np.flatnonzero(labels != labels[first])
        if len(wrong):
            number = int(tracklets[wrong[0]])
            images = [names[row] for row in (int(first[wrong[0]]), int(wrong[0]))]
            raise DataError(
                f"tracklet {column.names[number] if column.names else number} of {title} has several {kinds}: "
                f"{' and '.join(str(name_of(problem)) for problem in images)} (the same problem in "
                f"{plural(len(np.unique(numbers[wrong])), 'tracklet')}).\n"
                f"  fix: make the names in the column {COLUMN} unique, e.g. identity_camera_number"
            )
    return tracklets
