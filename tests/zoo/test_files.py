"""Downloads of the catalog from a local server: interrupted, damaged, moved, changed and simultaneous ones."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fake_hub
import pytest
import torch

from fastamp import zoo
from fastamp.checkpoint import download
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.utils.errors import ConfigError, WeightsError, WriteError

pytestmark = pytest.mark.integration
CONTENT = os.urandom(3 * 2**20 + 17)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Server of CONTENT; the first component of the path is the behavior."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        server, kind = self.server, urllib.parse.urlsplit(self.path).path.split("/")[1]
        server.paths.append(self.path)
        server.requests.append((kind, self.headers.get("Range")))
        count = sum(name == kind for name, _ in server.requests)
        content, status, headers = server.content, 200, {"ETag": f'"{hash(server.content)}"'}
        if kind == "missing":
            content, status = b"not found", 404
        elif kind == "busy" and count < 3:
            content, status = b"busy", 503
        elif kind == "page":
            content, headers = b"<!DOCTYPE html><title>Confirm</title>", {"Content-Type": "text/html; charset=utf-8"}
        elif kind == "truncated":  # by the server, which states the length of what it sends
            content = b"PK\x03\x04" + content
        elif kind == "hidden-page":
            content = b"\n<html>quota</html>"
        start = 0
        is_known = kind in ("resume", "broken", "always-broken") and self.headers.get("If-Range") == headers["ETag"]
        if is_known and (given := self.headers.get("Range")):
            start, status = int(given.removeprefix("bytes=").rstrip("-")), 206
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if kind == "always-broken" or (kind in ("broken", "no-range") and count == 1):
            self.wfile.write(content[start : start + (2**18 if kind == "always-broken" else 2**20)])
            self.close_connection = True
        else:
            self.wfile.write(content[start:])


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Server, an empty folder of the catalog, and no waiting between attempts."""
    monkeypatch.setenv("FASTAMP_ZOO", str(tmp_path / "zoo"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(download, "FIRST_WAIT", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.paths, server.content = [], [], CONTENT
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def entry_of(server):
    """Return a function: behavior of the server, facts -> entry of the catalog."""
    return lambda kind, **facts: replace(
        zoo.find("fastreid_bot_r50_market1501"), url=f"{server.address}/{kind}/file.pth", **facts
    )


def files():
    """Return the names of all files in the folder of the catalog, hidden ones too."""
    return sorted(path.name for path in zoo.zoo_folder().rglob("*") if path.is_file())


NAMES = ["fastreid_bot_r50_market1501.pth", "fastreid_bot_r50_market1501.pth.json"]


def test_file_is_downloaded_once_and_its_hash_is_recorded(server, entry_of):
    path = zoo.local_file(entry_of("plain"))
    assert path.read_bytes() == CONTENT and zoo.local_file(entry_of("plain")) == path
    assert len(server.requests) == 1 and files() == NAMES
    record = json.loads(path.with_name(NAMES[1]).read_text())
    assert (record["size"], record["sha256"]) == (len(CONTENT), SHA256)
    server.content = CONTENT[::-1]  # replaced under the same address
    path.unlink()
    with pytest.raises(WeightsError, match=SHA256):
        zoo.local_file(entry_of("plain"))


@pytest.mark.parametrize("kind, ranges", [("broken", [None, f"bytes={2**20}-"]), ("no-range", [None, "any"])])
def test_interrupted_download_is_continued_or_started_again(server, entry_of, kind, ranges):
    assert zoo.local_file(entry_of(kind)).read_bytes() == CONTENT
    found = [given for _, given in server.requests]
    assert found == ranges or (ranges[1] == "any" and len(found) == 2)
    assert files() == NAMES


def test_download_is_continued_by_the_next_call_unless_the_file_has_changed(server, entry_of):
    for content in (CONTENT, CONTENT[::-1]):
        server.content = CONTENT
        with pytest.raises(WeightsError, match=r"(?s)of \d+ bytes.*fix: "):
            zoo.local_file(entry_of("always-broken"))
        kept = files()
        assert NAMES[0] not in kept and len(kept) == 2  # the bytes that have arrived, and the tag
        server.requests.clear()
        server.content = content
        path = zoo.local_file(entry_of("resume"))
        assert server.requests[0][1] and path.read_bytes() == content and files() == NAMES
        path.unlink()
        path.with_name(NAMES[1]).unlink()


@pytest.mark.parametrize("kind", ["page", "hidden-page", "missing", "truncated"])
def test_answer_that_is_not_the_file_leaves_nothing(server, entry_of, kind):
    with pytest.raises(WeightsError) as caught:
        zoo.local_file(entry_of(kind))
    assert f"{server.address}/{kind}/file.pth" in str(caught.value) and "fix: " in str(caught.value)
    assert ("status 404" in str(caught.value)) == (kind == "missing")
    assert len(server.requests) == 1 and files() == []


def test_wrong_hash_suffix_and_size_leave_nothing(server, entry_of):
    for facts in ({"sha256": "0" * 64}, {"hash_suffix": "00000000"}, {"size": 5}):
        with pytest.raises(WeightsError, match="0000|expected 5"):
            zoo.local_file(entry_of("plain", **facts))
        assert files() == []
    assert zoo.local_file(entry_of("plain", hash_suffix=SHA256[:8], size=len(CONTENT))).exists()


def test_mirror_replaces_a_missing_file_and_a_busy_server_is_asked_again(server, entry_of):
    mirrored = entry_of("missing", mirrors=(f"{server.address}/page/x", f"{server.address}/busy/x"))
    assert zoo.local_file(mirrored).read_bytes() == CONTENT
    assert [kind for kind, _ in server.requests] == ["missing", "page", "busy", "busy", "busy"]
    zoo.path_of(mirrored).unlink()
    behind_a_page = entry_of("never", page=True, mirrors=(f"{server.address}/plain/x",))
    assert zoo.local_file(behind_a_page).read_bytes() == CONTENT
    assert "never" not in dict(server.requests)


def test_server_that_is_down_is_named(server, entry_of):
    server.shutdown()
    server.server_close()
    with pytest.raises(WeightsError, match=r"(?s)127\.0\.0\.1.*refused.*fix: "):
        zoo.local_file(entry_of("plain"))


def test_proxy_of_the_environment_is_asked(server, entry_of, monkeypatch):
    monkeypatch.setattr(urllib.request, "_opener", None)  # knows the environment of its first use
    monkeypatch.setenv("http_proxy", server.address)
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    address = "http://weights.invalid/plain/file.pth"
    assert zoo.local_file(replace(entry_of("plain"), url=address)).read_bytes() == CONTENT
    assert server.paths == [address]


def test_full_disk_leaves_nothing(server, entry_of, monkeypatch):
    def copy(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", copy)
    with pytest.raises(WriteError, match="No space left"):
        zoo.local_file(entry_of("plain"))
    assert files() == []


def test_offline_uses_existing_files_only(server, entry_of, monkeypatch):
    path = zoo.local_file(entry_of("plain"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert zoo.local_file(entry_of("plain")) == path
    path.unlink()
    with pytest.raises(WeightsError, match=r"HF_HUB_OFFLINE(.|\n)*FASTAMP_ZOO"):
        zoo.local_file(entry_of("plain"))
    assert len(server.requests) == 1


def test_unwritable_folder_is_named(server, entry_of, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTAMP_ZOO", str(tmp_path / "file/zoo"))
    with pytest.raises(ConfigError, match="file/zoo"):
        zoo.local_file(entry_of("plain"))


PROGRAM = """
import sys
from dataclasses import replace
from fastamp import zoo
print(zoo.local_file(replace(zoo.find("fastreid_bot_r50_market1501"), url=sys.argv[1])))
"""


def test_two_processes_download_once(server):
    command = [sys.executable, "-c", PROGRAM, f"{server.address}/plain/file.pth"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0] and len({*outputs}) == 1
    assert len(server.requests) == 1 and files() == NAMES


def test_file_on_the_hub_comes_at_its_revision_and_falls_back_to_a_mirror(server, entry_of, monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    with fake_hub.serve() as hub:
        hub.replace_hub(monkeypatch, tmp_path / "cache")
        repository = hub.add("user/models", {"market/a.pth": CONTENT})
        revision = repository.commits[0][0]
        repository.commit({"market/a.pth": b"another file"})
        url = f"https://huggingface.co/user/models/resolve/{revision}/market/a.pth"
        entry = replace(entry_of("plain"), url=url, sha256=SHA256)
        assert zoo.local_file(entry).read_bytes() == CONTENT and files() == NAMES
        for name in NAMES:
            (zoo.zoo_folder() / name).unlink()
        gone = replace(entry, url=url.replace("a.pth", "b.pth"))
        with pytest.raises(WeightsError, match=r"(?s)user/models.*fix: "):
            zoo.local_file(gone)
        assert files() == []
        assert zoo.local_file(replace(gone, mirrors=(f"{server.address}/plain/x",))).read_bytes() == CONTENT


def test_downloaded_file_is_a_checkpoint_with_its_config(server, entry_of, tmp_path):
    torch.save({"module.heads.bnneck.weight": torch.ones(3)}, tmp_path / "made.pth")
    server.content = (tmp_path / "made.pth").read_bytes()
    path = zoo.checkpoint(entry_of("plain"))
    content = read_checkpoint(path)
    assert list(content["model"]) == ["heads.bnneck.weight"] and "STEM_POOL: padded" in content["config"]
