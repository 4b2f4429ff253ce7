"""What ends all processes of a training when one of them fails: each learns the cause, and it is said once."""

import hmac
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

from fastamp.utils import comm
from fastamp.utils.moved import moved_names
from fastamp.utils.signals import set_handler

__getattr__ = moved_names(
    __name__, {"Lifeline": f"{__name__}.FailureMonitor", "causes_among": f"{__name__}.select_causes"}
)

GRACE_SECONDS = 2.0
"""How long the other processes of a failed training have to say what they know."""
_CONNECT_SECONDS = 60.0
_HANDSHAKE_SECONDS = 5.0
_LONGEST_MESSAGE = 2**20


@dataclass(frozen=True)
class Outcome:
    """How a process ended.

    Attributes:
        code: its exit code.
        message: what is to be said on stderr.
        rank: whose outcome it is.
        kind: a cause; a consequence of another process's end; or a process that is lost, which said nothing.
    """

    code: int
    message: str = ""
    rank: int = 0
    kind: Literal["cause", "consequence", "lost"] = "cause"


def select_causes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return what is to be said of ``outcomes``: each message once, consequences only where there is nothing else."""
    failed: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.code:
            failed.setdefault(outcome.message, outcome)
    causes = [outcome for outcome in failed.values() if outcome.kind != "consequence"] or list(failed.values())
    return sorted(causes, key=lambda outcome: not outcome.message)


def is_consequence(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, says that another process is gone."""
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
    while error is not None:
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


class FailureMonitor:
    """A connection of each process with rank 0, which the system closes when the process at its end dies.

    Collectives do not notice that a process has failed while it is still there, and NCCL's not even that it is gone.
    Rank 0 hears of every failure, gives the others ``GRACE_SECONDS`` to report what they know, and tells all; each
    then ends by itself, whatever its main thread waits for. Nothing is sent while all is well, so that a process that
    is merely busy is never taken for a dead one.

    Args:
        connections: rank -> connection, see ``connect``.
        report_causes: is called once with the causes, before the process ends.
        wait_before_exit: called after that; returns when this process may exit. None exits at once.
    """

    def __init__(
        self,
        connections: dict[int, "_Connection"],
        report_causes: Callable[[list[Outcome]], None],
        wait_before_exit: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.size = comm.get_rank(), comm.get_world_size()
        self._connections = connections
        self._report_causes = report_causes
        self._wait_before_exit = wait_before_exit
        self._own_outcome: Outcome | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._closed: set[int] = set()
        self._changed = threading.Condition()
        self._ending = threading.Lock()
        self._listeners = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in connections]
        for listener in self._listeners:
            listener.start()

    def close(self) -> None:
        """Take leave, when every process is done."""
        with self._changed:
            self._closed.add(self.rank)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send({"closed": True})
                connection.socket.shutdown(socket.SHUT_WR)

    def fail(self, outcome: Outcome) -> None:
        """Report this process's outcome and end it, as soon as the cause is clear; does not return."""
        set_handler(signal.SIG_IGN)  # it ends in a moment, with its own code
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        self._own_outcome = outcome = replace(outcome, rank=self.rank)
        if self.rank == 0:
            self._record(outcome)
        else:
            with suppress(OSError):  # rank 0 is lost then, which the listener finds
                self._connections[0].send(asdict(outcome))
        threading.Event().wait(3 * GRACE_SECONDS)
        self._exit_with([outcome])

    def _listen(self, peer: int) -> None:
        with suppress(OSError, ValueError):  # a broken connection is the end of one, too
            while (message := self._connections[peer].receive()) is not None:
                if "closed" in message:
                    self._closed.add(peer)
                elif "causes" in message:
                    self._exit_with([Outcome(**each) for each in message["causes"]])
                else:
                    self._record(Outcome(**message))
        self._connections[peer].socket.close()
        with self._changed:
            if {peer, self.rank} & self._closed or peer in self._outcomes:
                return
        lost = (
            f"the process of rank {peer} ended without a word: it was killed, e.g. by the system when memory ran out, "
            "or crashed"
        )
        self._record(Outcome(1, lost, peer, "lost"))

    def _record(self, outcome: Outcome) -> None:
        """Take notice of a failure; on rank 0 the first one starts the end of all."""
        if self.rank > 0:
            self._exit_with([outcome])
        with self._changed:
            first = not self._outcomes
            self._outcomes.setdefault(outcome.rank, outcome)
            self._changed.notify_all()
        if first:
            threading.Thread(target=self._collect_and_exit, daemon=True).start()

    def _collect_and_exit(self) -> None:
        """Wait for what the others have to report, and end all."""

        def complete() -> bool:
            return len(self._outcomes) == self.size or any(each.kind == "lost" for each in self._outcomes.values())

        with self._changed:
            self._changed.wait_for(complete, GRACE_SECONDS)
            causes = select_causes(self._outcomes.values())
        self._exit_with(causes)

    def _exit_with(self, causes: list[Outcome]) -> None:
        """Tell the causes and end this process; does not return."""
        self._ending.acquire()  # whoever comes second waits here for the end
        own = self._own_outcome
        try:
            # Each machine has a command of its own that resumes.
            self._report_causes([own] if own and own.code > 128 else causes)
            if self.rank == 0:
                for connection in self._connections.values():
                    with suppress(OSError):
                        connection.send({"causes": [asdict(each) for each in causes]})
                for listener in self._listeners:  # they must have read it before the connections break
                    if listener is not threading.current_thread():
                        listener.join(GRACE_SECONDS / self.size)
            for connection in self._connections.values():  # rank 0 does not wait for what follows
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
            if self._wait_before_exit is not None:
                self._wait_before_exit()
            for child in multiprocessing.active_children():
                child.kill()
        finally:
            os._exit(own.code if own and own.code > 128 else causes[0].code)


class _Connection:
    """A connection that carries JSON, a message a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for a machine that is lost as a whole
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        _open_connections.add(self)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end.

        Raises:
            OSError, ValueError: the connection is broken, or the message is none.
        """
        while b"\n" not in self._buffer:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._buffer += data
            if len(self._buffer) > _LONGEST_MESSAGE:
                raise ValueError("the message is too long")
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


_open_connections: "weakref.WeakSet[_Connection]" = weakref.WeakSet()


def _close_inherited_connections() -> None:
    """Close, in a process that was forked, the connections of its parent, which it would keep open after its death."""
    for connection in list(_open_connections):
        connection.socket.close()


def connect(host: str | None) -> dict[int, _Connection]:
    """Connect all processes with rank 0; all must call this together, when the process group is up.

    Args:
        host: the address of rank 0's machine; None is the name that it has for itself.

    Returns:
        Rank -> connection: those of all others on rank 0, rank 0's on the others.

    Raises:
        OSError: a process could not be reached within a minute.
    """
    os.register_at_fork(after_in_child=_close_inherited_connections)
    rank, size = comm.get_rank(), comm.get_world_size()
    if rank > 0:
        _, text = comm.select_text("")
        endpoint = json.loads(text)
        server_address = (host or endpoint["host"], endpoint["port"])
        connection = _Connection(socket.create_connection(server_address, _CONNECT_SECONDS))
        connection.socket.settimeout(None)
        connection.send({"token": endpoint["token"], "rank": rank})
        return {0: connection}
    token, connections = secrets.token_hex(16), {}
    dual_stack = host != "127.0.0.1" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    address = "127.0.0.1" if host == "127.0.0.1" else ""
    with socket.create_server((address, 0), family=family, dualstack_ipv6=dual_stack, backlog=size) as server:
        endpoint = {"host": socket.getfqdn(), "port": server.getsockname()[1], "token": token}
        comm.select_text(json.dumps(endpoint))
        server.settimeout(_CONNECT_SECONDS)
        while len(connections) < size - 1:
            accepted, _ = server.accept()
            accepted.settimeout(_HANDSHAKE_SECONDS)
            connection = _Connection(accepted)
            peer = _authenticated_rank(connection, token)
            if peer is None or not 0 < peer < size or peer in connections:
                accepted.close()  # not a process of this training
                continue
            accepted.settimeout(None)
            connections[peer] = connection
    return connections


def _authenticated_rank(connection: _Connection, token: str) -> int | None:
    """Return the rank of the process at the other end; None where that does not know the token."""
    try:
        message = connection.receive()
        authenticated = hmac.compare_digest(str(message["token"]).encode(), token.encode())
        return int(message["rank"]) if authenticated else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
