"""ReID models of the trackers of BoxMOT and Ultralytics, from a checkpoint or an ONNX, OpenVINO or TFLite file.

The adapters have the methods that these trackers call, and import neither package. Both packages have the license
AGPL-3.0; see the guide "Tracking" in the documentation.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastamp.inference import Predictor
from fastamp.inference.feature_model import FeatureModel
from fastamp.inference.images import crop_boxes
from fastamp.inference.runtime import ExportedModel, is_exported
from fastamp.retrieval.vectors import normalized
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)


class ReID:
    """Function from a frame and boxes to features of unit length, on which the adapters are built.

    Args:
        model: checkpoint, run folder or packaged model; ONNX file (.onnx), OpenVINO file (.xml) or TFLite file
            (.tflite) of `fastamp export`; ``Predictor`` or ``ExportedModel``.
        device: device of a checkpoint: ``auto`` (default), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``. Exported files are
            run on the CPU.

    Attributes:
        outside: number of boxes outside their frame so far.

    Raises:
        WeightsError, ConfigError: see ``Predictor`` and ``ExportedModel``.
    """

    def __init__(self, model: str | os.PathLike[str] | FeatureModel, *, device: str = "auto") -> None:
        self.model: FeatureModel
        if isinstance(model, (str, os.PathLike)):
            self.model = ExportedModel(model) if is_exported(model) else Predictor(model, device=device)
        else:
            self.model = model
        self.outside = 0

    def of_boxes(self, frame: NDArray[np.uint8], corners: NDArray[Any]) -> NDArray[np.float32]:
        """Extract the features of boxes.

        Args:
            frame: (H, W, 3) uint8 BGR, as in OpenCV.
            corners: (N, 4) or wider: left, top, right and bottom in pixels, which are rounded and clipped to the frame.

        Returns:
            (N, D) float32 of unit length. Boxes outside the frame, which have no pixels, get a constant that is almost
            orthogonal to features, because trackers require a finite feature of each box.
        """
        corners = np.asarray(corners, dtype=np.float64)
        if not corners.size:
            return np.zeros((0, self.model.feature_dim), dtype=np.float32)
        crops: list[Any] = crop_boxes(frame, corners.reshape(len(corners), -1)[:, :4])
        rows = [row for row, crop in enumerate(crops) if crop.size]
        outside = len(crops) - len(rows)
        if outside and not self.outside:
            logger.warning(
                "%d of %d boxes are outside the frame of %d x %d pixels, and have a constant feature; the first: %s. "
                "Further ones are only counted (attribute outside).\n"
                "  fix: pass boxes (x0, y0, x1, y1) in pixels of the frame",
                *(outside, len(crops), frame.shape[1], frame.shape[0]),
                next(box for box, crop in zip(corners[:, :4].tolist(), crops, strict=True) if not crop.size),
            )
        self.outside += outside
        width = self.model.feature_dim
        constant = np.where(np.arange(width) % 2, -1, 1) / width**0.5
        features = np.tile(constant.astype(np.float32), (len(crops), 1))
        if rows:
            inside = self.model.features([crops[row] for row in rows], color="bgr")
            features[rows] = normalized(inside.numpy(), "cosine")
        return features


class BoxmotReID(ReID):
    """ReID model of BoxMOT: the argument ``reid_model`` of its trackers.

    >>> from boxmot import BotSort  # doctest: +SKIP
    >>> tracker = BotSort(reid_model=BoxmotReID("logs/run"))  # doctest: +SKIP
    >>> tracks = tracker.update(detections, frame)  # doctest: +SKIP
    """

    def get_features(self, xyxys: NDArray[Any], img: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the features (N, D) of unit length of boxes (N, 4) left, top, right, bottom in a BGR frame."""
        return self.of_boxes(img, xyxys)


class UltralyticsReID(ReID):
    """ReID model of the trackers of Ultralytics that have an encoder: BoT-SORT, Deep OC-SORT and TrackTrack.

    >>> reid = UltralyticsReID("logs/run")  # doctest: +SKIP
    >>> model = YOLO("yolo26n.pt")  # doctest: +SKIP
    >>> reid.use_in(model)  # doctest: +SKIP
    >>> model.track("street.mp4", tracker="botsort.yaml")  # doctest: +SKIP
    """

    def __call__(self, img: NDArray[np.uint8], dets: NDArray[Any]) -> list[NDArray[np.float32]]:
        """Return a feature (D,) of unit length for each box (N, 4 or more): center x, center y, width, height."""
        boxes = np.asarray(dets, dtype=np.float64)
        if not boxes.size:
            return []
        half = boxes[:, 2:4] / 2
        return list(self.of_boxes(img, np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)))

    def attach(self, tracker: Any) -> None:
        """Make this the encoder of a tracker.

        Args:
            tracker: tracker such as ``ultralytics.trackers.BOTSORT``, created with or without ``with_reid``.

        Raises:
            ConfigError: if the tracker has no encoder, e.g. ByteTrack.
        """
        if not hasattr(tracker, "encoder"):
            raise ConfigError(
                f"the tracker {type(tracker).__name__} of Ultralytics has no ReID model.\n"
                "  fix: use tracker_type botsort, deepocsort or tracktrack"
            )
        # The model "auto" would pass features of the detector instead of the frame.
        for owner, values in ((tracker, {"encoder": self}), (tracker.args, {"with_reid": True, "model": "fastamp"})):
            for name, value in values.items():
                setattr(owner, name, value)

    def use_in(self, model: Any) -> None:
        """Attach this to the trackers that ``model.track`` of a YOLO model creates.

        Use a tracker file with ``with_reid: False`` (the default), so that no other ReID model is loaded.
        """

        def attach_all(predictor: Any) -> None:
            trackers: Sequence[Any] = getattr(predictor, "trackers", ())
            for tracker in trackers:
                if getattr(tracker, "encoder", None) is not self:
                    self.attach(tracker)

        model.add_callback("on_predict_batch_start", attach_all)
