"""Failure propagation: end all processes of a distributed run when one fails, and report the cause once."""

import hmac
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fastamp.utils import comm
from fastamp.utils.command_line import Outcome
from fastamp.utils.signals import set_handler

GRACE_SECONDS = 2.0
"""Seconds after the first failure during which other processes can report their own errors."""
_CONNECT_SECONDS = 60.0
_HANDSHAKE_SECONDS = 5.0
_LONGEST_MESSAGE = 2**20


def select_causes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Select the failures to report.

    Each message is selected once. Consequences and timeouts are selected only if there are no other failures.
    """
    failed: dict[str, Outcome] = {}
    for outcome in outcomes:
        if outcome.code:
            failed.setdefault(outcome.message, outcome)
    causes = [outcome for outcome in failed.values() if outcome.kind in ("cause", "lost")] or list(failed.values())
    return sorted(causes, key=lambda outcome: not outcome.message)


def is_consequence(error: BaseException | None) -> bool:
    """Return True if ``error`` or an exception in its chain reports a lost connection to another process."""
    signs = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
    while error is not None:
        if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_timeout(error: BaseException | None) -> bool:
    """Return True if ``error`` or an exception in its chain reports the timeout of a collective operation."""
    while error is not None:
        if isinstance(error, RuntimeError) and _timeout_line(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _timeout_line(text: str) -> str:
    """Return the last line of ``text`` that reports the timeout of a collective operation (gloo, NCCL or the store)."""
    signs = ("timed out waiting", "collective operation timeout", "wait timeout")
    return next((line for line in reversed(text.splitlines()) if any(sign in line.lower() for sign in signs)), "")


class FailureMonitor:
    """Monitor the processes of a training run and end all of them when one fails.

    Collectives do not detect a process that has failed but still runs, and NCCL does not detect a dead process either.
    Each rank above 0 therefore holds a TCP connection to rank 0. The operating system closes the connection when the
    process dies. Rank 0 receives every failure, waits ``GRACE_SECONDS`` for further reports, and sends the causes to
    all ranks. Each rank then exits from a listener thread, even if its main thread is blocked in a collective. Slow
    processes are never treated as dead, because no heartbeat is required. If a collective operation times out, rank 0
    asks every rank where it is: the cause is the ranks that do not answer, or else those that are not in a collective.

    All ranks must create it after ``init_process_group``.

    Args:
        connections: rank -> connection, see ``connect``.
        report_causes: called once with the causes before the process exits.
        wait_before_exit: called after ``report_causes``; blocks until this process may exit. None (default) exits
            immediately.
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
        self._places: dict[int, str] = {}
        own_process = json.dumps([socket.gethostname(), os.getpid()]).encode()
        self._processes = [json.loads(message) for message in comm.gather_bytes(own_process)]
        self._changed = threading.Condition()
        self._ending = threading.Lock()
        self._listeners = [threading.Thread(target=self._listen, args=(peer,), daemon=True) for peer in connections]
        for listener in self._listeners:
            listener.start()

    def close(self) -> None:
        """Close the connections. Call this only after all processes have finished."""
        with self._changed:
            self._closed.add(self.rank)
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send({"closed": True})
                connection.socket.shutdown(socket.SHUT_WR)

    def fail(self, outcome: Outcome) -> None:
        """Report the failure of this process to rank 0, and exit when rank 0 has sent the causes. Does not return."""
        set_handler(signal.SIG_IGN)  # the process exits within seconds, with its own code
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        self._own_outcome = outcome = replace(outcome, rank=self.rank)
        if self.rank == 0:
            self._record(outcome)
        else:
            with suppress(OSError):  # rank 0 is lost; the listener detects it
                self._connections[0].send(asdict(outcome))
        threading.Event().wait(3 * GRACE_SECONDS)
        # Rank 0 has not sent the causes.
        self._exit_with([self._unresponsive({0}, [outcome]) if outcome.kind == "timeout" else outcome])

    def _listen(self, peer: int) -> None:
        with suppress(OSError, ValueError):  # a broken connection counts as closed
            while (message := self._connections[peer].receive()) is not None:
                if "closed" in message:
                    self._closed.add(peer)
                elif "where" in message:
                    self._connections[peer].send({"place": _current_place()})
                elif "place" in message:
                    self._places[peer] = message["place"]
                elif "causes" in message:
                    self._exit_with([Outcome(**cause) for cause in message["causes"]])
                else:
                    self._record(Outcome(**message))
        self._connections[peer].socket.close()
        with self._changed:
            if {peer, self.rank} & self._closed or peer in self._outcomes:
                return
        lost = (
            f"the process of rank {peer} exited without reporting an error: it crashed or was killed, e.g. by the "
            "out-of-memory killer"
        )
        self._record(Outcome(1, lost, peer, "lost"))

    def _record(self, outcome: Outcome) -> None:
        """Record a failure. On rank 0, the first failure starts the shutdown of all ranks; other ranks exit."""
        if self.rank > 0:
            self._exit_with([outcome])
        with self._changed:
            first = not self._outcomes
            self._outcomes.setdefault(outcome.rank, outcome)
            self._changed.notify_all()
        if first:
            threading.Thread(target=self._collect_and_exit, daemon=True).start()

    def _collect_and_exit(self) -> None:
        """Wait for reports from the other ranks, then end all ranks."""

        def complete() -> bool:
            return len(self._outcomes) == self.size or any(
                outcome.kind == "lost" for outcome in self._outcomes.values()
            )

        self._places[0] = _current_place()
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send({"where": True})
        with self._changed:
            self._changed.wait_for(complete, GRACE_SECONDS)
            causes = select_causes(self._outcomes.values())
            missing = set(range(self.size)) - set(self._outcomes)
        if missing and any(cause.kind == "timeout" for cause in causes):
            # Of the ranks that reported nothing, some may wait as well, with a later timeout.
            silent = missing - set(self._places)
            busy = {rank for rank in missing & set(self._places) if "distributed_c10d.py" not in self._places[rank]}
            causes = [self._unresponsive(silent or busy or missing, causes)]
        self._exit_with(causes)

    def _unresponsive(self, ranks: set[int], reports: list[Outcome]) -> Outcome:
        """Return the outcome of ``ranks`` for which others waited in vain; ``reports`` are the timeouts of these."""
        lines = []
        for rank in sorted(ranks):
            host, pid = self._processes[rank]
            state = f"is still in {self._places[rank]}" if rank in self._places else "does not respond"
            if host == socket.gethostname() and _is_stopped(pid):
                state = "is stopped (SIGSTOP, SIGTSTP or a debugger)"
            lines.append(f"rank {rank}, process {pid} on {host}, {state}")
        lines += dict.fromkeys(_timeout_line(report.message).strip() for report in reports if report.kind == "timeout")
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
        message = (
            f"error: {names} did not take part in a collective operation before its timeout.\n"
            "  found: " + "\n         ".join(lines) + "\n"
            "  fix:   find out why the process hangs (its state in ps, its log, swapping, a debugger), and resume; if "
            "it was only slow, increase DIST_TIMEOUT_MINUTES"
        )
        return Outcome(1, message, min(ranks), "lost")

    def _exit_with(self, causes: list[Outcome]) -> None:
        """Report the causes and exit this process. Does not return."""
        self._ending.acquire()  # a second thread blocks here until the process exits
        outcome = self._own_outcome
        try:
            # The resume command in an interruption message differs between machines.
            self._report_causes([outcome] if outcome and outcome.code > 128 else causes)
            if self.rank == 0:
                for connection in self._connections.values():
                    with suppress(OSError):
                        connection.send({"causes": [asdict(cause) for cause in causes]})
                for listener in self._listeners:  # the ranks must read the causes before the connections close
                    if listener is not threading.current_thread():
                        listener.join(GRACE_SECONDS / self.size)
            for connection in self._connections.values():  # rank 0 does not wait for the cleanup below
                with suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_WR)
            if self._wait_before_exit is not None:
                self._wait_before_exit()
            for child in multiprocessing.active_children():
                child.kill()
        finally:
            os._exit(outcome.code if outcome and outcome.code > 128 else causes[0].code)


def _current_place() -> str:
    """Return the innermost three calls of the main thread, e.g. ``sleep (a.py:5), called by main (b.py:3)``."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]  # noqa: SLF001 (documented)
    calls = reversed(traceback.extract_stack(frame, limit=3))
    return ", called by ".join(f"{call.name} ({os.path.basename(call.filename)}:{call.lineno})" for call in calls)


def _is_stopped(pid: int) -> bool:
    """Return True if a process of this machine is stopped; False if it is not, or on systems without ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


class _Connection:
    """Connection that carries newline-delimited JSON messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a machine that is down
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        _open_connections.add(self)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Read the next message; return None if the peer has closed the connection.

        Raises:
            OSError: if the connection fails.
            ValueError: if the message is not valid JSON or longer than 1 MiB.
        """
        while b"\n" not in self._buffer:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._buffer += data
            if len(self._buffer) > _LONGEST_MESSAGE:
                raise ValueError(f"message longer than {_LONGEST_MESSAGE} bytes")
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


_open_connections: "weakref.WeakSet[_Connection]" = weakref.WeakSet()


def _close_inherited_connections() -> None:
    """Close inherited connections in a forked process. Otherwise, the death of the parent would not be detected."""
    for connection in list(_open_connections):
        connection.socket.close()


def connect(host: str | None) -> dict[int, _Connection]:
    """Connect every rank to rank 0. All ranks must call this after ``init_process_group``.

    Args:
        host: address of the machine that runs rank 0. None uses the host name of that machine.

    Returns:
        Rank -> connection. Rank 0 is connected to all other ranks, each other rank only to rank 0.

    Raises:
        OSError: if a rank does not connect within 60 s.
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
    token = secrets.token_hex(16)
    connections: dict[int, _Connection] = {}
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
    """Read the rank of the connected process; return None if its message is invalid or contains a wrong token."""
    try:
        message = connection.receive() or {}
        authenticated = hmac.compare_digest(str(message["token"]).encode(), token.encode())
        return int(message["rank"]) if authenticated else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
