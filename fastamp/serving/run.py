"""Run the service until SIGTERM or Ctrl-C; every request that was received is answered."""

import logging
import math
import signal
import socket
import sys
from functools import partial
from typing import Any

import uvicorn

from fastamp.serving.app import create_app
from fastamp.serving.connections import Connection, Server, allowed_connections
from fastamp.serving.service import Service
from fastamp.utils.errors import ConfigError, system_cause
from fastamp.utils.signals import handling

logger = logging.getLogger(__name__)


def serve(
    service: Service, *, host: str, port: int, api_key: str = "", local: bool = False, open_metrics: bool = False
) -> None:
    """Answer requests until the process is asked to stop.

    Args:
        service: what computes.
        host, port: address; port 0 chooses a free one.
        api_key, local, open_metrics: see ``create_app``.

    Raises:
        ConfigError: if the address cannot be used.
    """
    # The thread of the model takes Python's lock for each operation; at the default of 5 ms it waits for long.
    sys.setswitchinterval(0.0005)
    app = create_app(service, api_key=api_key, local=local, open_metrics=open_metrics)
    listening = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}"
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # each invalid form would be a warning
    limits = service.limits
    protocol: Any = partial(Connection, limits=limits, most=allowed_connections(limits.connections))
    config = uvicorn.Config(
        app,
        http=protocol,
        log_level="error",  # each invalid request would be a warning
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        timeout_graceful_shutdown=math.ceil(limits.stop_seconds),
    )

    def print_answered() -> None:
        print(f"stopped: answered {service.answered:,} of {service.received:,} requests", flush=True)

    server = Server(config, limits, print_answered)
    print(f"serving {service.model.checkpoint} at {address} (routes: {address}/docs)", flush=True)
    # Uvicorn stops at the first signal, and then raises it again for these handlers, which ignore it.
    with listening, handling(_ignore, (signal.SIGINT, signal.SIGTERM)):
        server.run(sockets=[listening])
    print_answered()


def _ignore(number: int, frame: Any) -> None:
    """Handle a signal that has stopped the server already."""


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {system_cause(error)}.\n"
            "  fix: choose another --host or --port; port 0 chooses a free one"
        ) from error
