"""A real HTTP server on this machine that serves files well or, by choice, badly."""

import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BEHAVIOURS = (
    "well",
    "breaks off",
    "breaks off once",
    "ignores range",
    "wrong bytes",
    "wrong range",
    "silent",
    "error 500",
)


class Server(ThreadingHTTPServer):
    """Serves `files`; `ranges` has the Range header of every request, in order."""

    def __init__(self, files: dict[str, bytes], behaviour: str, chunk: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.behaviour, self.chunk = files, behaviour, chunk
        self.ranges: list[str | None] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.ranges.append(asked)
        content = server.files.get(self.path[1:])
        if content is None:
            return self.send_error(404)
        if server.behaviour == "error 500":
            return self.send_error(500)
        if server.behaviour == "wrong bytes":
            content = bytes(len(content))
        start = 0
        if asked and server.behaviour != "ignores range":
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])
            if server.behaviour == "wrong range":
                start = 0
            if start >= len(content):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(self._what_comes_of(body))
        return None

    def _what_comes_of(self, body: bytes) -> bytes:
        """Less than was promised, where the server breaks off; the connection then closes."""
        server = self.server
        if server.behaviour == "silent":
            return b""
        if server.behaviour == "breaks off":
            return body[: server.chunk]
        if server.behaviour == "breaks off once" and len(server.ranges) == 1:
            return body[: server.chunk]
        return body


@contextmanager
def serving(files: dict[str, bytes], behaviour: str = "well", chunk: int = 1000):
    assert behaviour in BEHAVIOURS
    with Server(files, behaviour, chunk) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
