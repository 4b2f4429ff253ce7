"""Run scripts in subprocesses forked from a server process that has already imported PyTorch, which saves time.

The server does not import fastamp, does not compute and has a single thread, so that forking is safe. Unlike new
processes, the forked processes share a hash seed, and environment variables that PyTorch reads at import have no
effect. Start a new process if this matters.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


class Run:
    """Script that runs in a forked process.

    Args:
        words: path of the script, or ``-m`` and a module name, followed by its arguments.
        environment: additional environment variables.
        stdout: file descriptor to write the output to; -1 to capture it for ``finish``. Default -1.
    """

    def __init__(self, words: list[str], environment: dict[str, str], stdout: int = -1) -> None:
        self.words = words
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        request = json.dumps({"words": words, "environment": environment, "folder": os.getcwd()}).encode()
        reader, writer = os.pipe()
        self._status = os.fdopen(reader)
        files = [self._out.fileno() if stdout < 0 else stdout, self._err.fileno(), writer]
        socket.send_fds(_importing_process(), [request], files)
        os.close(writer)
        self.pid = int(self._status.readline())

    def finish(self, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        """Wait until the script exits.

        Returns:
            Exit code and captured output.

        Raises:
            subprocess.TimeoutExpired: if the script does not exit within ``timeout`` seconds; it is then killed.
        """
        if not select.select([self._status], [], [], timeout)[0]:
            os.kill(self.pid, signal.SIGKILL)
            self._status.read()
            raise subprocess.TimeoutExpired(self.words, timeout, *self._outputs())
        with self._status:
            return subprocess.CompletedProcess(self.words, int(self._status.read()), *self._outputs())

    def _outputs(self) -> list[str]:
        texts = []
        for file in (self._out, self._err):
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return texts


def run(script: str | Path, *words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a script with additional environment variables, and wait until it exits."""
    return start(script, *words, **environment).finish()


def start(script: str | Path, *words: object, **environment: str) -> Run:
    """Start a script with additional environment variables."""
    return Run([str(script), *map(str, words)], environment)


@functools.cache
def _importing_process() -> socket.socket:
    """Start the server and return the socket for requests; the server exits when the socket is closed."""
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(requests.close)
    return requests


def _serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a monitor and a worker for each request; return the request in the worker."""
    waiting: set[int] = set()
    while True:
        content, files, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not content:
            os._exit(0)
        waiting = {pid for pid in waiting if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if pid := os.fork():
            waiting.add(pid)
            for file in files:
                os.close(file)
            continue
        requests.close()
        if pid := os.fork():
            os.write(files[2], f"{pid}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(files[2], str(status).encode())
            os._exit(0)
        return json.loads(content), files


if __name__ == "__main__":
    # Exclude existing objects from garbage collection, which saves a second at the exit of each process. Triton would
    # print warnings about this to stderr.
    sys.modules["triton"] = None  # type: ignore[assignment]
    import torchvision.transforms.v2  # noqa: F401

    gc.freeze()
    request, files = _serve(socket.socket(fileno=int(sys.argv[1])))
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "FASTAMP_TEST_COMPILED" in os.environ:
        import compiled_steps  # only here, since it imports fastamp

        compiled_steps.install()
    sys.argv = request["words"]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
