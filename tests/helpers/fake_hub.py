"""HTTP server with the parts of the Hugging Face Hub's API that huggingface_hub uses to download and upload a model."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_writer"
_LFS = (".safetensors", ".bin")


@dataclass
class Repository:
    """Repository with its commits: (hash, file name -> content), oldest first."""

    private: bool = False
    gated: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit that adds or replaces files."""
        files = (self.commits[-1][1] if self.commits else {}) | files
        digest = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((digest, files))
        return digest

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a branch or hash."""
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class FakeHub:
    """State of the server.

    Attributes:
        repositories: name -> repository.
        requests: ``"METHOD /path"`` of each request.
        fail: path (a regular expression) -> (status, X-Error-Code, X-Error-Message) of requests that fail.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail: dict[str, tuple[int, str, str]] = {}
        self.endpoint = ""

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        """Add a repository with one commit."""
        self.repositories[name] = repository = Repository(**options)
        repository.commit(files)
        return repository

    def replace_hub(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Make huggingface_hub use this server, an empty cache and the token that may write."""
        from huggingface_hub import constants

        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, self.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", self.endpoint)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no token"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server stores files of Git LFS
        patch.setenv("HF_TOKEN", TOKEN)


@contextlib.contextmanager
def serve() -> Iterator[FakeHub]:
    """Run the server in a thread."""
    hub = FakeHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        url = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {url}")
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        for pattern, (status, code, message) in self.hub.fail.items():
            if re.search(pattern, f"{self.command} {url}"):
                return self._error(status, code, message)
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return self._error(401, "", "Invalid credentials in Authorization header")
        for pattern, function in _ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {url}"):
                return function(self, *found.groups(), body=body, is_writer=token == TOKEN)
        return self._error(501, "", f"not implemented: {self.command} {url}")

    # Answers

    def _send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, content_type="application/json")

    def _error(self, status: int, code: str, message: str) -> None:
        content = json.dumps({"error": message}).encode()
        self._send(content, status, content_type="application/json", x_error_code=code, x_error_message=message)

    def _found(self, name: str, revision: str, is_writer: bool) -> tuple[Repository, str, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not is_writer):
            return self._error(404 if is_writer else 401, "RepoNotFound", "Repository not found")
        commit = repository.at(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, *commit

    # Requests

    def info(self, name: str, revision: str | None, *, body: bytes, is_writer: bool) -> None:
        if found := self._found(name, revision or "main", is_writer):
            repository, digest, files = found
            siblings = [{"rfilename": file} for file in files]
            self._json({"id": name, "sha": digest, "private": repository.private, "siblings": siblings, "tags": []})

    def tree(self, name: str, revision: str, *, body: bytes, is_writer: bool) -> None:
        if found := self._found(name, revision, is_writer):
            if found[0].gated:
                return self._error(403, "GatedRepo", "Access is restricted")
            self._json([_entry(path, content) for path, content in found[2].items()])

    def resolve(self, name: str, revision: str, path: str, *, body: bytes, is_writer: bool) -> None:
        if not (found := self._found(name, revision, is_writer)):
            return None
        repository, digest, files = found
        if repository.gated:
            return self._error(403, "GatedRepo", "Access is restricted")
        if path not in files:
            return self._error(404, "EntryNotFound", "Entry not found")
        etag = f'"{_entry(path, files[path]).get("lfs", {}).get("oid") or _git_hash(files[path])}"'
        return self._send(files[path], x_repo_commit=digest, etag=etag)

    def create(self, *, body: bytes, is_writer: bool) -> None:
        description = json.loads(body)
        name = f"{description['organization']}/{description['name']}"
        if name in self.hub.repositories:
            message = "You already created this model repo"
            return self._json({"error": message, "url": f"{self.hub.endpoint}/{name}"}, 409)
        self.hub.add(name, {".gitattributes": b""}, private=description.get("visibility") == "private")
        return self._json({"url": f"{self.hub.endpoint}/{name}", "name": name})

    def validate(self, *, body: bytes, is_writer: bool) -> None:
        text = json.loads(body)["content"]
        errors = [] if text.startswith("---\nlicense: ") else [{"message": '"license" is required'}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, name: str, revision: str, *, body: bytes, is_writer: bool) -> None:
        modes = [
            {"path": entry["path"], "uploadMode": "lfs" if entry["path"].endswith(_LFS) else "regular",
             "shouldIgnore": False} for entry in json.loads(body)["files"]
        ]  # fmt: skip
        self._json({"files": modes})

    def batch(self, name: str, *, body: bytes, is_writer: bool) -> None:
        objects = [
            {"oid": entry["oid"], "size": entry["size"],
             "actions": {"upload": {"href": f"{self.hub.endpoint}/objects/{entry['oid']}"}}}
            for entry in json.loads(body)["objects"]
        ]  # fmt: skip
        self._json({"transfer": "basic", "objects": objects})

    def put(self, digest: str, *, body: bytes, is_writer: bool) -> None:
        self.hub.objects[digest] = body
        self._send(b"")

    def commit(self, name: str, revision: str, *, body: bytes, is_writer: bool) -> None:
        if not (found := self._found(name, revision, is_writer)):
            return None
        files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if hashlib.sha256(self.hub.objects[value["oid"]]).hexdigest() != value["oid"]:
                    return self._error(400, "", "wrong object")
                files[value["path"]] = self.hub.objects[value["oid"]]
        digest = found[0].commit(files)
        url = f"{self.hub.endpoint}/{name}/commit/{digest}"
        return self._json({"success": True, "commitOid": digest, "commitUrl": url})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    entry = {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
    return entry | ({"lfs": lfs} if path.endswith(_LFS) else {})


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


_NAME = "([^/]+/[^/]+)"
_ROUTES = {
    f"GET /api/models/{_NAME}(?:/revision/(.+))?": _Handler.info,
    f"GET /api/models/{_NAME}/tree/([^/]+)": _Handler.tree,
    f"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)": _Handler.resolve,
    "POST /api/repos/create": _Handler.create,
    "POST /api/validate-yaml": _Handler.validate,
    f"POST /api/models/{_NAME}/preupload/(.+)": _Handler.preupload,
    rf"POST /{_NAME}\.git/info/lfs/objects/batch": _Handler.batch,
    "PUT /objects/([0-9a-f]+)": _Handler.put,
    f"POST /api/models/{_NAME}/commit/(.+)": _Handler.commit,
}
