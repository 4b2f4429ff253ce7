"""Track the detections of a video: find the boxes of each identity by appearance and motion (DeepSORT).

The detections are a text file of any detector in the format of the MOT Challenge, a line for each box:
frame,id,left,top,width,height,confidence. Frames are numbered from 1; the id is ignored. SOURCE is a folder of frames
that are named by their number, a sequence of the MOT Challenge (its det/det.txt is the default for --detections), or a
video file (pip install fastamp[video]). Without --model, only motion is used.

Written to the output folder: tracks.txt (results in the same format), tracks.csv with the line of each detection,
tracks.png (crops of each track), and with --video tracks.mp4.

examples:
  fastamp track frames/ --detections det.txt --model logs/run
  fastamp track street.mp4 --detections det.txt --model logs/run/model_best.pth --video -o street
  fastamp track MOT17/train/MOT17-04-FRCNN --model logs/run --gt MOT17/train/MOT17-04-FRCNN/gt/gt.txt
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fastamp.cli.model_arguments import EXPORTED_HELP, model_of
from fastamp.cli.options import add_key_values, add_plugin_argument, at_least

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastamp.tracking.frames import Frames
    from fastamp.tracking.mot_file import Boxes

# The defaults of fastamp.tracking.TrackerOptions, which would import SciPy.
MAX_DISTANCE, MAX_AGE, MIN_HITS = 0.3, 30, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("source", metavar="SOURCE", help="folder of frames, sequence of the MOT Challenge, or video")
    parser.add_argument("--detections", metavar="DET.txt", help="detections (default: SOURCE/det/det.txt)")
    parser.add_argument("--model", dest="checkpoint", default="", metavar="MODEL", help=EXPORTED_HELP)
    parser.add_argument("--output", "-o", default="tracks", metavar="FOLDER", help="output folder (default: tracks)")
    parser.add_argument("--video", action="store_true", help="also write a video with the tracks")
    parser.add_argument(
        "--gt", metavar="GT.txt", help="ground truth, to print identity switches, MOTA and IDF1 of the tracks"
    )
    parser.add_argument(
        "--min-confidence", type=float, metavar="X", help="ignore detections of lower confidence (default: use all)"
    )
    parser.add_argument(
        "--max-distance",
        type=float,
        default=MAX_DISTANCE,
        metavar="X",
        help="largest cosine distance of features of the same identity, 0 to 2 (default: %(default)s)",
    )
    parser.add_argument(
        "--max-age",
        type=at_least(1),
        default=MAX_AGE,
        metavar="N",
        help="a track ends after more than this number of frames without a detection (default: %(default)s)",
    )
    parser.add_argument(
        "--min-hits",
        type=at_least(1),
        default=MIN_HITS,
        metavar="N",
        help="detections in consecutive frames that start a track (default: %(default)s)",
    )
    for name in ("camid", "viewid"):
        kind = "camera" if name == "camid" else "view"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{kind}, for a model with {kind} embeddings")
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:N or mps (default: auto)")
    add_plugin_argument(parser)
    parser.set_defaults(opts=[])
    add_key_values(parser, dest="key_values")


def run(args: argparse.Namespace) -> int:
    """Track the detections, write the files and print a summary."""
    from fastamp.tracking.frames import Frames, import_av
    from fastamp.tracking.metrics import check_ids, tracking_metrics
    from fastamp.tracking.mot_file import read_boxes
    from fastamp.tracking.track import check_frames, check_output, track
    from fastamp.tracking.tracker import TrackerOptions
    from fastamp.utils.plural import plural

    output = check_output(args.output)
    options = TrackerOptions(max_distance=args.max_distance, max_age=args.max_age, min_hits=args.min_hits)
    detections = _detections(args)
    truth = read_boxes(args.gt) if args.gt else None
    if truth is not None:
        check_ids(truth)
    if args.video:
        import_av("--video")
    frames = Frames(args.source)
    check_frames(frames, detections)
    features = None
    if args.checkpoint:
        features = _features(args, detections)
    tracks = track(detections, features, options)
    _write(output, frames, tracks, video=args.video)
    count = len(set(tracks.ids.tolist()))
    print(f"{plural(count, 'track')} with {len(tracks)} of {plural(len(detections), 'detection')}")
    if truth is not None:
        print(tracking_metrics(truth, tracks))
    return 0


def _detections(args: argparse.Namespace) -> "Boxes":
    """Read the detections of sufficient confidence."""
    from fastamp.tracking.mot_file import read_boxes
    from fastamp.utils.errors import ConfigError, DataError

    path = args.detections or Path(args.source) / "det/det.txt"
    if not args.detections and not Path(path).is_file():
        raise ConfigError(
            f"--detections is missing, and there is no {path}.\n"
            "  fix: pass the output of a detector, with lines frame,id,left,top,width,height,confidence"
        )
    detections = read_boxes(path)
    if args.min_confidence is None:
        return detections
    kept = detections.select(detections.confidences >= args.min_confidence)
    if not len(kept):
        raise DataError(
            f"{path}: none of {len(detections)} detections has a confidence of at least {args.min_confidence:g}; the "
            f"highest is {detections.confidences.max():g}.\n  fix: decrease --min-confidence"
        )
    return kept


def _features(args: argparse.Namespace, detections: "Boxes") -> "NDArray[np.float32]":
    """Extract the features of the detections."""
    from fastamp.tracking.frames import Frames
    from fastamp.tracking.track import detection_features, embedder

    model = model_of(args, args.key_values)
    frames = Frames(args.source, bit_depth=model.transforms.bit_depth, decoder=model.transforms.decoder)
    ids = {name: value for name, value in (("camids", args.camid), ("viewids", args.viewid)) if value is not None}
    return detection_features(frames, detections, embedder(model, **ids), batch=model.batch_size)


def _write(output: Path, frames: "Frames", tracks: "Boxes", *, video: bool) -> None:
    """Write the results and print the names of the files."""
    from fastamp.tracking.frames import write_video
    from fastamp.tracking.mot_file import write_boxes
    from fastamp.tracking.track import sheet_rows, write_csv, write_sheet
    from fastamp.utils.errors import writing
    from fastamp.utils.progress import track as show_progress

    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    write_boxes(output / "tracks.txt", tracks)
    write_csv(output / "tracks.csv", tracks)
    written = ["tracks.txt", "tracks.csv"]
    shown = sorted({int(tracks.frames[row]) for track_rows in sheet_rows(tracks) for row in track_rows})
    if shown:
        write_sheet(output / "tracks.png", show_progress(frames.read(shown), len(shown), "contact sheet"), tracks)
        written.append("tracks.png")
    if video:
        every = show_progress(frames.read(), frames.count, "writing the video")
        write_video(output / "tracks.mp4", every, tracks, frames.rate)
        written.append("tracks.mp4")
    print(f"wrote {', '.join(str(output / name) for name in written)}")
