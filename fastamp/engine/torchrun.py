"""Shutdown of ranks under torchrun.

Ranks on the machine that hosts the rendezvous store exit after the agents of all other machines. Every rank exits if
its own agent exits.
"""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import MethodType

from fastamp.engine.hooks import StopOnSignal

_POLL_SECONDS = 0.05
_OTHERS_SECONDS = 6.0
_STOP_SECONDS = 30.0
_ESTABLISHED, _LISTEN = "01", "0A"


def is_worker() -> bool:
    """Return True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def wait_for_other_agents() -> None:
    """Wait until the agents of other machines have disconnected from the local rendezvous store, for at most 6 s.

    One agent hosts the rendezvous store, and all agents use the store until they exit. An agent exits about 0.1 s after
    its ranks. If the hosting agent exits first, all other agents print a traceback about the closed connection after
    the actual error. The ranks of the hosting agent therefore exit last.

    The function returns immediately on all other machines, if the agent will restart its ranks, and on systems without
    ``/proc``.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return
    deadline = time.monotonic() + _OTHERS_SECONDS
    while count_store_connections(os.getppid()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def count_store_connections(agent: int) -> int:
    """Count the connections of other processes to the rendezvous store of an agent.

    Args:
        agent: process id of the agent. Connections to its second store, which serves its ranks at MASTER_PORT, are not
            counted.

    Returns:
        Number of connections; 0 if the agent does not host the rendezvous store.
    """
    links = []
    try:
        for path in Path(f"/proc/{agent}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed in the meantime
                links.append(os.readlink(path))
        tables = [Path(f"/proc/{agent}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return 0
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    sockets = []  # state, local port, remote port
    for _, local, remote, state, *_, inode in (line.split()[:10] for table in tables for line in table):
        if inode in inodes:
            sockets.append((state, *(int(address.rpartition(":")[2], 16) for address in (local, remote))))
    ports = {port for state, port, _ in sockets if state == _LISTEN} - {int(os.environ.get("MASTER_PORT") or 0)}
    served = sum(state == _ESTABLISHED and port in ports for state, port, _ in sockets)
    # Both ends of the agent's own connection are in this process.
    return served - sum(state == _ESTABLISHED and port in ports for state, _, port in sockets)


def exit_with_agent() -> None:
    """Start a thread that ends this process after its agent has exited, e.g. because the agent was killed.

    A training process has 30 s to finish the current step and save a checkpoint, as after SIGTERM. Any other process
    exits immediately.
    """
    threading.Thread(target=_exit_after_agent, args=(os.getppid(),), daemon=True).start()


def _exit_after_agent(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(1)
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, MethodType) and isinstance(handler.__self__, StopOnSignal):
        if handler.__self__.received is None:  # a second signal would end it without saving
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOP_SECONDS)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
