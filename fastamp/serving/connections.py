"""HTTP server with limits of connections: their number, and the times of headers, idle connections and slow readers."""

import logging
import os
import resource
import socket
import sys
import threading
import time
from asyncio import Transport
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastamp.serving.options import Limits

logger = logging.getLogger(__name__)

# Files of the gallery, of the model and of large uploads.
_OTHER_FILES = 400
_CHECKS = 10  # of the calls of on_tick, which are 0.1 s apart
_LAST_SECONDS = 5  # from the end of the time to stop to the end of the process


def allowed_connections(requested: int) -> int:
    """Raise the limit of open files of this process, and return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return requested
    allowed = max(1, soft - _OTHER_FILES if soft > 2 * _OTHER_FILES else soft // 2)
    logger.warning(
        "%d files may be open at once, so that at most %d connections are accepted instead of %d.\n"
        "  fix: increase the limit (ulimit -n), or decrease --connections",
        soft,
        allowed,
        requested,
    )
    return allowed


class Connection(H11Protocol):
    """Connection of a client, which is closed if the client is late."""

    def __init__(self, *args: Any, limits: Limits, most: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits, self._most = limits, most
        self._waits_since: float | None = time.monotonic()  # for a complete header
        self._unsent_since: float | None = None

    @property
    def idle_since(self) -> float:
        """Time since which no request is answered; infinite if one is."""
        return float("inf") if self._waits_since is None else self._waits_since

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close the one that is idle for the longest time."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            others: Any = self.connections
            oldest = min(others, key=lambda connection: connection.idle_since)
            oldest.abort()

    def abort(self) -> None:
        """Close the connection without sending what is buffered."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._waits_since = time.monotonic()
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # it had arrived already
            self._waits_since = None

    def close_if_late(self) -> None:
        """Close the connection if a header is not complete, or an answer is not read."""
        now = time.monotonic()
        if not self.transport.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > self._limits.send_seconds:
            self.abort()
        if now - self.idle_since > self._limits.header_seconds:
            self.abort()


class Server(uvicorn.Server):
    """Server that closes the connections of late clients, and ends if requests are not answered after a signal."""

    def __init__(self, config: uvicorn.Config, limits: Limits, ended: Callable[[], None]) -> None:
        super().__init__(config)
        self._limits, self._ended = limits, ended
        self._end_timer = threading.Timer(limits.stop_seconds + _LAST_SECONDS, self._end)
        self._end_timer.daemon = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer requests until a signal. After that, nothing ends the process."""
        try:
            super().run(sockets)
        finally:
            self._end_timer.cancel()

    async def on_tick(self, counter: int) -> bool:
        """Check the connections once per second."""
        if counter % _CHECKS == 0:
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                connection.close_if_late()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; end the process if that takes too long."""
        if not self.should_exit:
            self._end_timer.start()
        super().handle_exit(sig, frame)

    def _end(self) -> None:
        self._ended()
        sys.stdout.flush()
        os._exit(1)
