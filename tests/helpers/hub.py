"""A server that answers as the hub of Hugging Face does about one data set, org/name."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0" * 40


@contextmanager
def hub_of(files: Mapping[str, bytes], ranges: list[str]) -> Iterator[str]:
    """Yield the address of a hub with some files; `ranges` gets the names of those read in part."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0]).partition("/org/name")[2].strip("/")
            kind, _, name = [*path.split("/", 2), "", ""][:3]
            headers, content = {"ETag": '"tag"', "X-Repo-Commit": COMMIT}, b""
            if kind == "resolve" and name in files:
                content = files[name]
                if wanted := self.headers.get("Range"):
                    ranges.append(name)
                    first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                    content = content[first : last + 1]
            elif kind == "tree":
                content = json.dumps(_listing(files, name)).encode()
            elif kind in ("", "revision"):
                content = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode()
            else:
                headers["X-Error-Code"] = "EntryNotFound"
            self.send_response(404 if "X-Error-Code" in headers else 200)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def _listing(files: Mapping[str, bytes], folder: str) -> list[dict[str, object]]:
    """Return what lies directly in a folder."""
    prefix = f"{folder}/" if folder else ""
    inside = [name.removeprefix(prefix) for name in files if name.startswith(prefix)]
    folders = {name.partition("/")[0] for name in inside if "/" in name}
    found: list[dict[str, object]] = [{"type": "directory", "path": prefix + n} for n in folders]
    sizes = {prefix + name: len(files[prefix + name]) for name in inside if "/" not in name}
    found += [{"type": "file", "path": name, "size": size} for name, size in sizes.items()]
    return [{"oid": "1", **entry} for entry in found]
