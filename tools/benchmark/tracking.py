#!/usr/bin/env python
"""Print identity switches, MOTA and IDF1 with and without ReID on generated sequences (`fastamp demo --sequence`).

`fastamp track` is measured for several values of --max-distance on the sequences of --choose; the value with the fewest
switches there (then the highest IDF1) is measured on the sequences of --seeds, as are BoT-SORT of BoxMOT and of
Ultralytics with the adapters, if they are installed. All use the same features, of the model --model.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tabulate import tabulate

from fastamp import Predictor
from fastamp.demo.sequence import generate_sequence
from fastamp.inference.runtime import ExportedModel, is_exported
from fastamp.integrations import BoxmotReID, UltralyticsReID
from fastamp.tracking import Boxes, TrackerOptions, TrackingMetrics, read_boxes, tracking_metrics
from fastamp.tracking.frames import Frames
from fastamp.tracking.track import detection_features, embedder, track
from fastamp.utils.progress import track as show_progress

DISTANCES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
ULTRALYTICS = {"track_high_thresh": 0.25, "track_low_thresh": 0.1, "new_track_thresh": 0.25, "track_buffer": 30}
ULTRALYTICS |= {"match_thresh": 0.8, "fuse_score": True, "gmc_method": "none", "proximity_thresh": 0.5}
ULTRALYTICS |= {"appearance_thresh": 0.8, "with_reid": False, "model": "auto"}
Measure = Callable[["Scene"], TrackingMetrics]


class CachedFeatures:
    """Model that computes the features of each crop once, because several trackers ask for them."""

    def __init__(self, model: Predictor | ExportedModel) -> None:
        self._model, self._found = model, {}  # type: ignore[var-annotated]
        self.feature_dim = model.feature_dim

    def features(self, crops: Sequence[np.ndarray], *, color: str = "rgb") -> Any:
        """Return the features (N, D) of crops."""
        crops = [np.ascontiguousarray(crop if color == "rgb" else crop[..., ::-1]) for crop in crops]
        keys = [(crop.shape, crop.tobytes()) for crop in crops]
        missing = {key: crop for key, crop in zip(keys, crops, strict=True) if key not in self._found}
        if missing:
            self._found |= zip(missing, self._model.features(list(missing.values())), strict=True)
        return np.stack([self._found[key] for key in keys]).view(_Array)


class _Array(np.ndarray):
    def numpy(self) -> np.ndarray:
        """Return the values, as a tensor does."""
        return self.view(np.ndarray)


class Scene:
    """Generated sequence with the features of its detections."""

    def __init__(self, folder: Path, seed: int, frames: int, model: CachedFeatures) -> None:
        generate_sequence(folder, seed=seed, frames=frames)
        self.seed, self.model, self.frames = seed, model, Frames(folder)
        self.detections, self.truth = read_boxes(folder / "det/det.txt"), read_boxes(folder / "gt/gt.txt")
        self.features = detection_features(self.frames, self.detections, embedder(model), batch=32)


def fastamp_track(sequence: Scene, *, distance: float | None) -> TrackingMetrics:
    """Measure `fastamp track` with --max-distance, or without a model if it is None."""
    options = TrackerOptions() if distance is None else TrackerOptions(max_distance=distance)
    tracks = track(sequence.detections, None if distance is None else sequence.features, options)
    return tracking_metrics(sequence.truth, tracks)


def measure_tracker(sequence: Scene, update: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> TrackingMetrics:
    """Measure a function from rows (N, 6) of corners, confidence and class, and a BGR frame, to corners and ids."""
    rows: list[tuple[int, ...]] = []
    for number, frame in sequence.frames.read():
        here = sequence.detections.select(sequence.detections.frames == number)
        corners = np.concatenate([here.boxes[:, :2], here.boxes[:, :2] + here.boxes[:, 2:]], axis=1)
        table = np.concatenate([corners, here.confidences[:, None], np.zeros((len(here), 1))], axis=1)
        tracked = np.asarray(update(table.astype(np.float32), np.ascontiguousarray(frame[..., ::-1])))
        rows += [(number, int(box[4]), *box[:4]) for box in tracked]
    table = np.array(rows, dtype=np.float64).reshape(-1, 6)
    boxes = np.concatenate([table[:, 2:4], table[:, 4:6] - table[:, 2:4]], axis=1)
    integers = (np.arange(len(table)) + 1, table[:, 0].astype(np.int64), table[:, 1].astype(np.int64))
    return tracking_metrics(sequence.truth, Boxes(Path("tracks"), *integers, boxes, np.ones(len(table))))


def boxmot(sequence: Scene, *, reid: bool, **options: Any) -> TrackingMetrics:
    """Measure BoT-SORT of BoxMOT."""
    from boxmot import BotSort

    if reid:
        options["reid_model"] = BoxmotReID(sequence.model)  # type: ignore[arg-type]
    tracker = BotSort(use_embeddings=reid, **options)
    return measure_tracker(sequence, lambda table, frame: tracker.update(table, frame))


def ultralytics(sequence: Scene, *, reid: bool) -> TrackingMetrics:
    """Measure BoT-SORT of Ultralytics without camera motion."""
    from ultralytics.engine.results import Boxes as Results
    from ultralytics.trackers import BOTSORT

    tracker = BOTSORT(SimpleNamespace(**ULTRALYTICS))
    if reid:
        UltralyticsReID(sequence.model).attach(tracker)  # type: ignore[arg-type]
    return measure_tracker(sequence, lambda table, frame: tracker.update(Results(table, frame.shape[:2]), frame))


def variants(chosen: float) -> dict[str, Measure]:
    """Return the measured trackers by title."""
    measures: dict[str, Measure] = {
        "fastamp track, motion": partial(fastamp_track, distance=None),
        "fastamp track, --max-distance 0.2": partial(fastamp_track, distance=0.2),
        f"fastamp track, --max-distance {chosen:g} (chosen)": partial(fastamp_track, distance=chosen),
        "BoxMOT, motion": partial(boxmot, reid=False),
        "BoxMOT, ReID": partial(boxmot, reid=True),
        "BoxMOT, ReID, proximity_thresh=0.99": partial(boxmot, reid=True, proximity_thresh=0.99),
        "Ultralytics, motion": partial(ultralytics, reid=False),
        "Ultralytics, ReID": partial(ultralytics, reid=True),
    }
    for package in ("boxmot", "ultralytics"):
        try:
            __import__(package)
        except ImportError:
            print(f"{package} is not installed, so it is not measured: pip install {package}", file=sys.stderr)
            measures = {title: result for title, result in measures.items() if not title.lower().startswith(package)}
    return measures


def table(titles: dict[str, Measure], sequences: list[Scene]) -> tuple[str, dict[str, tuple[int, float]]]:
    """Return a table of switches, MOTA and IDF1, and the total switches and negative mean IDF1 of each title."""
    rows, totals = [], {}
    for title, measure in show_progress(titles.items(), len(titles), "tracking"):
        results = [measure(sequence) for sequence in sequences]
        rows.append([title, *(f"{result.switches}, {result.mota:.1f}, {result.idf1:.1f}" for result in results)])
        totals[title] = (
            sum(result.switches for result in results),
            -float(np.mean([result.idf1 for result in results])),
        )
    return tabulate(rows, ["switches, MOTA, IDF1", *(f"seed {sequence.seed}" for sequence in sequences)]), totals


def main(argv: list[str] | None = None) -> int:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="logs/demo", help="model of ReID (default: %(default)s)")
    parser.add_argument(
        "--choose", type=int, nargs="+", default=[10, 11, 12], help="sequences that choose the distance"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="sequences of the results")
    parser.add_argument("--frames", type=int, default=200, help="frames of each sequence (default: %(default)s)")
    args = parser.parse_args(argv)
    model = CachedFeatures(ExportedModel(args.model) if is_exported(args.model) else Predictor(args.model))
    with tempfile.TemporaryDirectory() as folder:
        seeds = (*args.choose, *args.seeds)
        sequences = {seed: Scene(Path(folder) / str(seed), seed, args.frames, model) for seed in seeds}
        distances = {f"--max-distance {limit:g}": partial(fastamp_track, distance=limit) for limit in DISTANCES}
        text, totals = table(distances, [sequences[seed] for seed in args.choose])
        print(text, end="\n\n")
        chosen = DISTANCES[min(range(len(DISTANCES)), key=lambda index: list(totals.values())[index])]
        print(table(variants(chosen), [sequences[seed] for seed in args.seeds])[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
