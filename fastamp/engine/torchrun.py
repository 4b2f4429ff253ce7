"""Ranks under torchrun: they end after the agents that use their agent's store, and with their agent."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from fastamp.engine.hooks import StopOnSignal
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "count_store_users": f"{__name__}.count_store_connections",
        "end_with_agent": f"{__name__}.exit_with_agent",
        "is_rank": f"{__name__}.is_worker",
    },
)

_POLL_SECONDS = 0.05
_OTHERS_SECONDS = 6.0
_STOP_SECONDS = 30.0
_ESTABLISHED, _LISTEN = "01", "0A"


def is_worker() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def wait_for_other_agents() -> None:
    """Return when the other machines' agents have left the rendezvous store of this machine's agent, or after 6 s.

    An agent ends up to a tenth of a second and its own shutdown after its ranks, and that of one machine hosts the
    store that all use until their end. If it ends first, the others print that the connection was closed, with a
    traceback, after the cause. So the ranks of that machine end last. No effect on other machines, if the agent will
    restart its ranks, and where the system does not list connections as Linux does.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return
    deadline = time.monotonic() + _OTHERS_SECONDS
    while count_store_connections(os.getppid()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def count_store_connections(agent: int) -> int:
    """Return how many connections others have with the rendezvous store in a process; 0 if it has none.

    Args:
        agent: the process. Its store of the ranks, at MASTER_PORT, does not count.
    """
    links = []
    try:
        for path in Path(f"/proc/{agent}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(path))
        tables = [Path(f"/proc/{agent}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return 0
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    sockets = []  # state, local port, remote port
    for _, local, remote, state, *_, inode in (line.split()[:10] for table in tables for line in table):
        if inode in own:
            sockets.append((state, *(int(address.rpartition(":")[2], 16) for address in (local, remote))))
    ports = {port for state, port, _ in sockets if state == _LISTEN} - {int(os.environ.get("MASTER_PORT") or 0)}
    served = sum(state == _ESTABLISHED and port in ports for state, port, _ in sockets)
    # The agent's own connection has both its ends there.
    return served - sum(state == _ESTABLISHED and port in ports for state, _, port in sockets)


def exit_with_agent() -> None:
    """Let this process stop, in a thread that waits for that, when its agent has ended, e.g. because it was killed.

    A training finishes its step and saves as after SIGTERM, for which it has 30 seconds; anything else ends at once.
    """
    threading.Thread(target=_exit_after_agent, args=(os.getppid(),), daemon=True).start()


def _exit_after_agent(agent: int) -> None:
    while os.getppid() == agent:
        time.sleep(1)
    hook = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(hook, StopOnSignal):
        if hook.received is None:  # a second signal would end it at once
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STOP_SECONDS)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
