"""Tests of the running service: a stop under load, and its page in a browser."""

import base64
import os
import re
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import preloaded
import pytest
import tiny
from browser import PROGRAM, Browser
from preloaded import Run

from fastamp import Predictor
from fastamp.data.build import build_dataset
from fastamp.inference.gallery_source import add_images
from fastamp.retrieval.mutable_gallery import MutableGallery

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

pytestmark = [pytest.mark.extras, pytest.mark.slow]
KEY = "0123456789abcdef"


class Server:
    """Running service: its address, process id, and its output after the end."""

    def __init__(self, run, output):
        self.run, self.output = run, output
        first = output.readline()
        assert first.startswith("serving"), first + str(run.finish())
        self.address, self.pid = re.search(r"http://[\d.:]+", first)[0], run.pid

    def stop(self):
        """Send SIGTERM; return the exit code and the last line."""
        os.kill(self.pid, signal.SIGTERM)
        done = self.run.finish(60)
        return done.returncode, self.output.read().splitlines()[-1], done.stderr


@contextmanager
def serving(checkpoint, *options):
    reader, writer = os.pipe()
    words = ["-m", "fastamp", "serve", checkpoint, "--device", "cpu", "--port", 0, "--plugin", tiny.__file__, *options]
    run = Run(list(map(str, words)), {"FASTAMP_API_KEY": ""}, stdout=writer)
    os.close(writer)
    with os.fdopen(reader) as output:
        server = Server(run, output)
        yield server


def test_every_received_request_is_answered_when_the_service_stops_under_load(demo, checkpoint, tmp_path):
    content = Path(build_dataset("Demo").query[0].path).read_bytes()
    folder, lock = tmp_path / "a.gallery", threading.Lock()
    statuses, acknowledged = [], []
    warm = threading.Barrier(13)

    def send(number, address):
        route = "/v1/gallery/items" if number % 2 else "/v1/features"
        with httpx.Client(base_url=address, timeout=30) as client:
            for step in range(10_000):
                try:
                    answer = client.post(route, files={"images": ("a.jpg", content)})
                except httpx.TransportError:  # the service has stopped before it received the request
                    return
                with lock:
                    statuses.append(answer.status_code)
                    acknowledged.extend(answer.json().get("ids", ()))
                if step == 3:
                    warm.wait(60)

    with serving(checkpoint, "--gallery", folder, "--queue", 4, "--images", 4, "--batch", 2) as server:
        threads = [threading.Thread(target=send, args=(number, server.address)) for number in range(12)]
        for thread in threads:
            thread.start()
        warm.wait(60)
        code, last, errors = server.stop()
        for thread in threads:
            thread.join(30)
    assert code == 0 and "Traceback" not in errors, errors
    assert last == f"stopped: answered {len(statuses):,} of {len(statuses):,} requests"
    assert {*statuses} == {200, 201, 429}  # overloaded
    with MutableGallery(folder) as gallery:
        assert {item.id for item in gallery.items} == {*acknowledged}


def connect(address):
    return socket.create_connection(address.removeprefix("http://").split(":"), timeout=20)


def is_closed(client):
    """Wait until the server closes a connection."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_late_clients_do_not_keep_others_out_and_do_not_keep_the_service_alive(checkpoint):
    options = ("--connections", 6, "--header-seconds", 1, "--stop-seconds", 1, "--megabytes", 1, "--idle-seconds", 1)
    with serving(checkpoint, *options) as server, ExitStack() as opened:
        idle = [opened.enter_context(connect(server.address)) for _ in range(20)]
        assert httpx.get(f"{server.address}/health", timeout=20).json()["status"] == "ok"
        assert all(map(is_closed, idle[:14]))
        for start in (b"GET /health HTTP/1.1\r\nHost: 127", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET"):
            late = opened.enter_context(connect(server.address))
            late.sendall(start)
            answer = b"".join(iter(lambda client=late: client.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 200") == start.endswith(b"GET")
        # An error is sent while the client uploads.
        for head in (
            b"Content-Length: 3000000",
            b"Connection: close\r\nContent-Length: 900000",
            b"Transfer-Encoding: chunked",
        ):
            uploading = opened.enter_context(connect(server.address))
            uploading.sendall(b"POST /v1/features HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n")
            if b"chunked" in head:
                uploading.sendall(b"100000\r\n")
            uploading.sendall(bytes(800_000))
            answer = b""
            while b'"fix"' not in answer:
                part = uploading.recv(4096)
                assert part, answer
                answer += part
            assert re.match(rb"HTTP/1.1 4(13|15) ", answer)
        not_reading = opened.enter_context(connect(server.address))
        not_reading.settimeout(2)
        with suppress(TimeoutError):
            for _ in range(2000):
                not_reading.sendall(b"GET /docs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100)
        code, last, errors = server.stop()
    assert code == 0 and "Traceback" not in errors, errors
    assert last.startswith("stopped: answered")


# Drops a picture on the page, as a browser does for a file of the user.
DROP = """(content => {
  const bytes = Uint8Array.from(atob(content), c => c.charCodeAt(0)), data = new DataTransfer();
  data.items.add(new File([bytes], 'query.jpg', {type: 'image/jpeg'}));
  for (const name of ['dragenter', 'dragover', 'drop'])
    document.getElementById('drop').dispatchEvent(
      new DragEvent(name, {dataTransfer: data, bubbles: true, cancelable: true}));
})"""
SHOWN = "[...document.querySelectorAll('#matches img')].filter(i => i.naturalWidth > 0).length"


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium or Chrome (apt-get install chromium)")
def test_page_shows_the_matches_of_a_dropped_picture(demo, checkpoint, tmp_path):
    images = [item.path for item in build_dataset("Demo").query[:5]]
    add_images(tmp_path / "a.gallery", images, Predictor(checkpoint, device="cpu"))
    (tmp_path / "key").write_text(KEY)
    options = ("--gallery", tmp_path / "a.gallery", "--api-key-file", tmp_path / "key")
    with serving(checkpoint, *options) as server, Browser(tmp_path / "profile") as browser:
        browser.call("Page.navigate", url=server.address)
        browser.wait_for("document.readyState === 'complete' && location.protocol === 'http:'")
        browser.wait_for("!document.getElementById('key-line').hidden")  # asks for the key
        browser.value(
            f"(k => {{k.value = '{KEY}'; k.dispatchEvent(new Event('change'))}})(document.getElementById('key'))"
        )
        browser.wait_for("document.getElementById('gallery').textContent === '5 images'")
        picture = base64.b64encode(Path(images[2]).read_bytes()).decode()
        browser.value(f"{DROP}('{picture}')")
        browser.wait_for(f"{SHOWN} === 5")
        assert Path(images[2]).name in browser.value("document.querySelector('#matches li').textContent")
        assert "5 of 5 images" in browser.value("document.getElementById('status').textContent")
        assert browser.value("document.documentElement.scrollWidth <= window.innerWidth")
        broken = base64.b64encode(b"not an image").decode()
        browser.value(f"{DROP}('{broken}')")
        browser.wait_for("document.getElementById('status').className === 'error'")
        assert browser.value("document.querySelectorAll('#matches li').length") == 0
        assert all(
            request.startswith((server.address, f"blob:{server.address}", "data:,")) for request in browser.requests
        )
        # The browser reports the answers 401 and 422; there are no other messages, such as violations of the policy.
        # Verbose ones are hints, e.g. for password managers.
        complaints = [complaint for complaint in browser.complaints if not complaint.startswith("verbose:")]
        assert all("status of 4" in complaint for complaint in complaints), complaints
        browser.call("Page.navigate", url=f"{server.address}/docs")
        browser.wait_for("document.body?.textContent.includes('POST /v1/search')")
        assert server.stop()[0] == 0


STOPPING = """
import logging, signal, threading
from types import SimpleNamespace
from fastamp.serving import run
from fastamp.serving.options import Limits

def timers():
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]

def stop(server, sockets):
    signal.raise_signal(signal.SIGTERM)
    assert server.should_exit and len(timers()) == 1

def shutdown(*handlers):
    raise AssertionError("log handlers are closed")

run.Server.run, logging.shutdown, kept = stop, shutdown, logging.shutdown
service = SimpleNamespace(
    model=SimpleNamespace(checkpoint="model.pth"), limits=Limits(), counts={"received": 3, "answered": 3}
)
run.serve(None, service, host="127.0.0.1", port=0)
logging.shutdown = kept
for timer in timers():
    timer.join(60)
print("timers", len(timers()))
"""


def test_process_is_not_ended_after_the_server_has_stopped(tmp_path):
    """``serve`` may be called by a program that continues. The program is another process, which gets a signal."""
    pytest.importorskip("fastamp.serving.run")
    (tmp_path / "program.py").write_text(STOPPING)
    done = preloaded.run(tmp_path / "program.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("stopped: answered 3 of 3 requests\ntimers 0\n")
