"""Tracking of given detections: association by appearance and motion, metrics, and files of the MOT Challenge."""

from fastamp.tracking.metrics import TrackingMetrics, tracking_metrics
from fastamp.tracking.mot_file import Boxes, read_boxes, write_boxes
from fastamp.tracking.tracker import Tracker, TrackerOptions

__all__ = [
    "Boxes",
    "Tracker",
    "TrackerOptions",
    "TrackingMetrics",
    "read_boxes",
    "tracking_metrics",
    "write_boxes",
]
