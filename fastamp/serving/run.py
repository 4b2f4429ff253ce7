"""Run the service until SIGTERM or Ctrl-C; every request that was received is answered."""

import logging
import signal
import socket
import sys
from typing import Any

import uvicorn

from fastamp.serving.app import create_app
from fastamp.serving.service import Service
from fastamp.utils.errors import ConfigError
from fastamp.utils.signals import handling

logger = logging.getLogger(__name__)


def serve(service: Service, *, host: str, port: int, api_key: str = "", local: bool = False) -> None:
    """Answer requests until the process is asked to stop.

    Args:
        service: what computes.
        host, port: address; port 0 chooses a free one.
        api_key, local: see ``create_app``.

    Raises:
        ConfigError: if the address cannot be used.
    """
    # The thread of the model takes Python's lock for each operation; at the default of 5 ms it waits for long.
    sys.setswitchinterval(0.0005)
    app = create_app(service, api_key=api_key, local=local)
    listening = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}"
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", server_header=False)
    server = uvicorn.Server(config)
    print(f"serving {service.model.checkpoint} at {address} (routes: {address}/docs)", flush=True)
    # Uvicorn stops at the first signal, and then raises it again for these handlers, which ignore it.
    with listening, handling(_ignore, (signal.SIGINT, signal.SIGTERM)):
        server.run(sockets=[listening])
    print(f"stopped: answered {service.answered:,} of {service.received:,} requests", flush=True)


def _ignore(number: int, frame: Any) -> None:
    """Handle a signal that has stopped the server already."""


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {getattr(error, 'strerror', None) or error}.\n"
            "  fix: choose another --host or --port; port 0 chooses a free one"
        ) from error
