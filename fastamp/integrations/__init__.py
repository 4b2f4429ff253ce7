"""Adapters that make fastamp models the ReID models of trackers: BoxMOT and Ultralytics."""

from fastamp.integrations.trackers import BoxmotReID, ReID, UltralyticsReID

__all__ = ["BoxmotReID", "ReID", "UltralyticsReID"]
