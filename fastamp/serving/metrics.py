"""Prometheus metrics of the service."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Metrics in a registry of their own.

    Attributes:
        requests: answered requests, by route, method and status.
        seconds: time of requests, by route.
        batches: images per batch.
    """

    def __init__(self, pending: Callable[[], int], items: Callable[[], int] | None) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("route", "method", "status")
        self.requests = Counter("fastamp_requests", "Answered requests", labels, registry=registry)
        self.seconds = Histogram(
            "fastamp_request_seconds", "Time of requests", ("route",), buckets=_SECONDS, registry=registry
        )
        self.batches = Histogram("fastamp_batch_images", "Images per batch", buckets=_BATCHES, registry=registry)
        waiting = Gauge("fastamp_pending_images", "Images that wait or are computed", registry=registry)
        waiting.set_function(pending)
        if items is not None:
            Gauge("fastamp_gallery_items", "Items in the gallery", registry=registry).set_function(items)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
