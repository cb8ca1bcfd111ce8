"""An OpenAI-compatible server in a thread that misbehaves as it is told."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = ("tiny",)


@dataclass
class Reply:
    """What the server does with a request: ``status`` and ``body``, after ``wait`` seconds, or a reset connection."""

    body: Any = None  # text as it is, else sent as JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0
    reset: bool = False


def completion(content: Any, finish_reason: Any = "stop", **message: Any) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}}
    return Reply({"choices": [choice | {"finish_reason": finish_reason}], "usage": {"completion_tokens": 3}})


def echo(request: dict[str, Any]) -> Reply:
    return completion(f"re: {request['messages'][-1]['content']}")


class Server(ThreadingHTTPServer):
    """behave(request, n) -> Reply for the n-th request (from 0) with the same last message."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, behave: Callable[[dict[str, Any], int], Reply], models: tuple[str, ...], key: str | None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave, self.models, self.key = behave, models, key
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.attempts: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.refused():
            return
        if self.path == "/v1/models":
            self.send(Reply({"object": "list", "data": [{"id": name} for name in self.server.models]}))
        else:
            self.send(Reply({"detail": "Not Found"}, 404))

    def do_POST(self) -> None:
        if self.refused():
            return
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = request["messages"][-1]["content"]
        with server.lock:
            server.requests.append(request)
            server.times.append(time.monotonic())
            number = server.attempts[last]
            server.attempts[last] += 1
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            reply = server.behave(request, number)
            time.sleep(reply.wait)
        finally:
            with server.lock:
                server.in_flight -= 1
        self.send(reply)

    def refused(self) -> bool:
        wanted = self.server.key
        if wanted is None or self.headers.get("Authorization") == f"Bearer {wanted}":
            return False
        self.send(Reply({"error": {"message": "Incorrect API key"}}, 401))
        return True

    def send(self, reply: Reply) -> None:
        if reply.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        content = (reply.body if isinstance(reply.body, str) else json.dumps(reply.body)).encode()
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(
    behave: Callable[[dict[str, Any], int], Reply] = lambda request, number: echo(request),
    models: tuple[str, ...] = MODELS,
    key: str | None = None,
) -> Iterator[Server]:
    server = Server(behave, models, key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
