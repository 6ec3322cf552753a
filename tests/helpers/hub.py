"""A server that answers as the hub of Hugging Face does about one data set, org/name."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


@contextmanager
def hub_of(files: Mapping[str, bytes], ranges: list[str]) -> Iterator[str]:
    """Yield the address of a hub with files without folders; `ranges` gets those read in part."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].partition("/org/name")[2].strip("/")
            kind, _, name = [*path.split("/", 2), "", ""][:3]
            answer: object = {"id": "org/name", "sha": COMMIT, "siblings": []}
            if kind == "tree":
                file = {"type": "file", "oid": "1"}
                answer = [{**file, "path": n, "size": len(files[n])} for n in files]
            content = files.get(name, b"") if kind == "resolve" else json.dumps(answer).encode()
            if wanted := self.headers.get("Range"):
                ranges.append(name)
                first, last = map(int, wanted.removeprefix("bytes=").split("-"))
                content = content[first : last + 1]
            self.send_response(200 if content else 404)
            headers = {"ETag": '"tag"', "X-Repo-Commit": COMMIT, "Content-Length": len(content)}
            for key, value in headers.items():
                self.send_header(key, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
