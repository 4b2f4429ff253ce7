"""HTTP server with limits of connections: their number, and the times of headers, idle connections and slow readers."""

import logging
import resource
import sys
import time
from asyncio import Transport
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastamp.serving.options import Limits

logger = logging.getLogger(__name__)

# Files of the gallery, of the model and of large uploads.
_OTHER_FILES = 400


def allowed_connections(requested: int) -> int:
    """Raise the limit of open files of this process, and return the number of connections that it allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    files = max(soft, min(hard, requested + _OTHER_FILES))
    if files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, limits[1]))
    allowed = min(requested, max(files - _OTHER_FILES, files // 2))
    if allowed < requested:
        logger.warning(
            "%d files may be open at once, so that at most %d connections are accepted instead of %d.\n"
            "  fix: increase the limit (ulimit -n), or decrease --connections",
            files,
            allowed,
            requested,
        )
    return allowed


class Connection(H11Protocol):
    """Connection of a client, which is closed if the client is late."""

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        # Times since which the connection has no request, unless one is answered, and no data of an answer to send.
        self._waits_since = self._sent = time.monotonic()

    @property
    def idle_since(self) -> float:
        """Time since which no request is answered; infinite if one is."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return float("inf") if answering else self._waits_since

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close the one that is idle for the longest time."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            others: Any = self.connections
            oldest = min(others, key=lambda connection: connection.idle_since)
            oldest.abort()

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""
        self.connections.discard(self)
        self.transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has arrived already."""
        self._waits_since = time.monotonic()
        super().on_response_complete()

    def close_if_late(self) -> None:
        """Close the connection if a header is not complete, or an answer is not read."""
        now = time.monotonic()
        if not self.transport.get_write_buffer_size():
            self._sent = now
        if now - self._sent > self._limits.send_seconds or now - self.idle_since > self._limits.header_seconds:
            self.abort()


class Server(uvicorn.Server):
    """Server that closes the connections of late clients; its caller handles signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle no signals."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Check the connections, 10 times per second."""
        connections: Any = list(self.server_state.connections)
        for connection in connections:
            connection.close_if_late()
        return await super().on_tick(counter)
