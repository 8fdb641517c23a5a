"""A local stand-in of the Hugging Face Hub: the part of its HTTP API that creating, pushing and loading a model uses.

Clients are told its address, HF_ENDPOINT=http://127.0.0.1:PORT, and HF_HUB_DISABLE_XET=1 before they import
huggingface_hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = r"(?P<id>[\w.-]+/[\w.-]+)"


@dataclass
class Repository:
    """Files of the only branch."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        """40 hex digits that change with the content."""
        digest = hashlib.sha1()
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + b"\0" + content)
        return digest.hexdigest()


class HubServer:
    """Use as a context manager; `repositories` shows what arrived, `requests` who asked for what."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}  # large files by sha256, until a commit names them
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Routes; a request that the stand-in does not know is a 501 that the client reports."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet: the tests look at `requests`."""

    def _route(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{method} {path}")
        self.hub.tokens.add(self.headers.get("Authorization"))
        for pattern, methods, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method in methods:
                action(self, match, body)
                return
        self._reply({"error": f"the stand-in has no {method} {path}"}, status=501)

    def _reply(self, content: Any, *, status: int = 200, error_code: str | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if error_code is not None:
            self.send_header("X-Error-Code", error_code)
            self.send_header("X-Error-Message", error_code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        if found is None:
            self._reply({"error": "Repository not found"}, status=404, error_code="RepoNotFound")
        return found

    def create(self, match: re.Match[str], body: bytes) -> None:
        request = json.loads(body)
        owner = request.get("organization") or "somebody"
        name = f"{owner}/{request['name']}"
        if name in self.hub.repositories:
            self._reply({"error": "already there", "url": f"{self.hub.endpoint}/{name}"}, status=409)
            return
        self.hub.repositories[name] = Repository(
            private=request.get("private") or request.get("visibility") == "private"
        )
        self._reply({"url": f"{self.hub.endpoint}/{name}", "id": name, "name": name})

    def validate(self, match: re.Match[str], body: bytes) -> None:
        self._reply({"errors": [], "warnings": []})

    def preupload(self, match: re.Match[str], body: bytes) -> None:
        """Weights go as large files, everything else in the commit itself."""
        modes = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for one in json.loads(body)["files"]
        ]
        self._reply({"files": modes})

    def large_files(self, match: re.Match[str], body: bytes) -> None:
        objects = [
            {
                "oid": one["oid"],
                "size": one["size"],
                "authenticated": True,
                "actions": {"upload": {"href": f"{self.hub.endpoint}/upload/{one['oid']}"}},
            }
            for one in json.loads(body)["objects"]
        ]
        self._reply({"transfer": "basic", "objects": objects})

    def upload(self, match: re.Match[str], body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == match["oid"]
        self.hub.uploads[match["oid"]] = body
        self._reply({})

    def commit(self, match: re.Match[str], body: bytes) -> None:
        repository = self._repository(match["id"])
        if repository is None:
            return
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.uploads[value["oid"]]
        address = f"{self.hub.endpoint}/{match['id']}/commit/{repository.commit}"
        self._reply({"success": True, "commitOid": repository.commit, "commitUrl": address, "hookOutput": ""})

    def model(self, match: re.Match[str], body: bytes) -> None:
        repository = self._repository(match["id"])
        if repository is None:
            return
        self._reply(
            {
                "id": match["id"],
                "modelId": match["id"],
                "sha": repository.commit,
                "private": repository.private,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": [{"rfilename": path} for path in sorted(repository.files)],
            }
        )

    def tree(self, match: re.Match[str], body: bytes) -> None:
        repository = self._repository(match["id"])
        if repository is not None:
            self._reply(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in sorted(repository.files.items())
                ]
            )

    def resolve(self, match: re.Match[str], body: bytes) -> None:
        repository = self._repository(match["id"])
        if repository is None:
            return
        content = repository.files.get(match["path"])
        if content is None:
            self._reply({"error": "Entry not found"}, status=404, error_code="EntryNotFound")
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


ROUTES = (
    (r"/api/repos/create", ("POST",), _Handler.create),
    (r"/api/validate-yaml", ("POST",), _Handler.validate),
    (rf"/api/models/{REPOSITORY}/preupload/[^/]+", ("POST",), _Handler.preupload),
    (rf"/{REPOSITORY}\.git/info/lfs/objects/batch", ("POST",), _Handler.large_files),
    (r"/upload/(?P<oid>[0-9a-f]{64})", ("PUT",), _Handler.upload),
    (rf"/api/models/{REPOSITORY}/commit/[^/]+", ("POST",), _Handler.commit),
    (rf"/api/models/{REPOSITORY}(/revision/[^/]+)?", ("GET",), _Handler.model),
    (rf"/api/models/{REPOSITORY}/tree/[^/]+", ("GET",), _Handler.tree),
    (rf"/{REPOSITORY}/resolve/[^/]+/(?P<path>.+)", ("GET", "HEAD"), _Handler.resolve),
)


def run_client(hub: HubServer, code: str, *arguments: str, cache: Path) -> str:
    """Standard output of Python code that talks to the stand-in, in a process that knows of no other Hub."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "a-token",
        "HF_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, "-c", code, *arguments]
    client = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert client.returncode == 0, client.stderr
    return client.stdout
