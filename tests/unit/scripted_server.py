"""An HTTP server that answers as a test tells it to, also with what a real one sends only when it
breaks: cut streams, error events, odd framing."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Handler = Callable[["Exchange"], None]


class Exchange:
    """One request, and the ways to answer it."""

    def __init__(self, http: BaseHTTPRequestHandler, body: Any) -> None:
        self.http = http
        self.path = http.path
        self.headers = dict(http.headers.items())
        self.body = body

    def json(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.http.send_response(status)
        for name, value in {"content-length": str(len(data)), **(headers or {})}.items():
            self.http.send_header(name, value)
        self.http.end_headers()
        self.http.wfile.write(data)

    def start_stream(self) -> None:
        self.http.send_response(200)
        self.http.send_header("content-type", "text/event-stream")
        self.http.send_header("transfer-encoding", "chunked")
        self.http.end_headers()

    def chunk(self, data: bytes) -> None:
        self.http.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.http.wfile.flush()

    def event(self, body: Any) -> None:
        text = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)
        self.chunk(f"data: {text}\n\n".encode())

    def end(self) -> None:
        self.chunk(b"")

    def stay_silent(self, for_s: float) -> None:
        """Say nothing until it is over, or the client has hung up."""
        self.http.connection.settimeout(for_s)
        with contextlib.suppress(TimeoutError):
            self.http.connection.recv(1)
        self.http.close_connection = True

    def wait_for_hang_up(self, timeout_s: float = 5.0) -> bool:
        """Keep sending comments until the client is gone."""
        deadline = time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline:
                self.chunk(b": still here\n\n")
                time.sleep(0.01)
        except OSError:
            return True
        return False


class ScriptedServer:
    """Owns a server, its `handler`, and the exchanges it had."""

    def __init__(self) -> None:
        self.handler: Handler = completion
        self.exchanges: list[Exchange] = []
        self.num_open = self.most_open = 0
        self._lock = threading.Lock()
        scripted = self

        class _Http(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                scripted.answer(Exchange(self, None))

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                scripted.answer(Exchange(self, json.loads(data)))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Http)
        self._http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answer(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.json({"data": [{"id": "tiny"}]})
            return
        with self._lock:
            self.exchanges.append(exchange)
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            self.handler(exchange)
        finally:
            with self._lock:
                self.num_open -= 1

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)


@contextmanager
def scripted_server(handler: Handler | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    if handler is not None:
        server.handler = handler
    try:
        yield server
    finally:
        server.close()


def completion(exchange: Exchange) -> None:
    """Echo the prompt, as one answer or as a stream of its words."""
    prompt = exchange.body["prompt"]
    words = str(prompt).split(" ")
    usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
    if not exchange.body.get("stream"):
        choice = {"index": 0, "text": str(prompt), "finish_reason": "length"}
        exchange.json({"id": "cmpl-1", "model": "tiny", "choices": [choice], "usage": usage})
        return
    exchange.start_stream()
    for word in words:
        choice = {"index": 0, "text": word, "finish_reason": None, "token_ids": [1]}
        exchange.event({"choices": [choice]})
    exchange.event({"choices": [], "usage": usage, "timing": {"ttft_s": 0.1}})
    exchange.event("[DONE]")
    exchange.end()
