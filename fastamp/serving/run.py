"""Run the service until SIGTERM or Ctrl-C; every request that was received is answered."""

import logging
import math
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI

from fastamp.serving.connections import Connection, Server, allowed_connections
from fastamp.serving.service import Service
from fastamp.utils.errors import ConfigError, system_cause
from fastamp.utils.signals import handling

_LAST_SECONDS = 5  # from the end of the time to stop to the end of the process


def serve(app: FastAPI, service: Service, *, host: str, port: int) -> None:
    """Answer requests until the process is asked to stop.

    Args:
        app: application of ``create_app``.
        service: what computes.
        host, port: address; port 0 chooses a free one.

    Raises:
        ConfigError: if the address cannot be used.
    """
    # The thread of the model takes Python's lock for each operation; at the default of 5 ms it waits for long.
    sys.setswitchinterval(0.0005)
    listening = _listen(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listening.getsockname()[1]}"
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # each invalid form would be a warning
    limits = replace(service.limits, connections=allowed_connections(service.limits.connections))
    protocol: Any = partial(Connection, limits=limits)
    config = uvicorn.Config(
        app,
        http=protocol,
        log_config=None,  # Uvicorn's would close all log handlers of the process
        log_level="error",  # each invalid request would be a warning
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        timeout_graceful_shutdown=math.ceil(limits.stop_seconds),
    )
    server = Server(config)

    def print_answered() -> None:
        counts = service.counts
        print(f"stopped: answered {counts['answered']:,} of {counts['received']:,} requests", flush=True)

    def end() -> None:
        print_answered()
        os._exit(1)

    def stop(number: int, frame: Any) -> None:
        if not server.should_exit:
            end_timer.start()
        server.handle_exit(number, frame)

    end_timer = threading.Timer(limits.stop_seconds + _LAST_SECONDS, end)
    end_timer.daemon = True
    print(f"serving {service.model.checkpoint} at {address} (routes: {address}/docs)", flush=True)
    try:
        with listening, handling(stop, (signal.SIGINT, signal.SIGTERM)):
            server.run(sockets=[listening])
    finally:
        end_timer.cancel()
    print_answered()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {system_cause(error)}.\n"
            "  fix: choose another --host or --port; port 0 chooses a free one"
        ) from error
