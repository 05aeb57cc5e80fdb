"""A loopback server that speaks OpenAI's protocol and judges as a completion's own words tell it to."""

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """A judge whose verdict is what the completion says after `grade:`; other words in it make it misbehave."""

    request_queue_size = 600
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.seen: Counter[str] = Counter()
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.knows_schemas = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """How many requests have come for the model that the path ends with."""
        model = self.path.rpartition("/")[2]
        self.reply(200, sum(request["model"] == model for request in self.server.requests))

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = judged(request)
        with server.lock:
            server.requests.append(request)
            server.headers.append(self.headers)
            server.seen[text] += 1
            times = server.seen[text]
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            self.answer(request, text, times)
        finally:
            with server.lock:
                server.at_once -= 1

    def answer(self, request: dict[str, Any], text: str, times: int) -> None:
        if "response_format" in request and not self.server.knows_schemas:
            return self.fail(400, "response_format is not supported")
        if request["model"] == "unknown":
            return self.fail(404, "no such model")
        if self.headers["Authorization"] == "Bearer sk-wrong":
            return self.fail(401, "Incorrect API key provided: sk-wrong")
        if "busy" in text and (times == 1 or "always" in text):
            return self.fail(429, "slow down")
        if "broken" in text:
            return self.fail(500, "internal")
        if "half" in text:
            self.close_connection = True
            return self.send(200, b'{"choices": [{"mess', length=1000)
        if "never" in text:
            time.sleep(20)
        time.sleep(0.2 if "late" in text else 0.0)
        message: dict[str, Any] = {"role": "assistant", "content": verdict(request, text)}
        if "declined" in text:
            message = {"role": "assistant", "content": None, "refusal": "I would rather not."}
        choice = {"index": 0, "message": message, "finish_reason": "length" if "cut" in text else "stop"}
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return self.reply(200, body)

    def fail(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"message": message}})

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send(status, data, len(data))

    def send(self, status: int, data: bytes, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)


REFUSED = {
    "cut": 'It says {"reason": "a", "answer_1": true}',
    "garbage": "I think it is quite good.",
    "twice": '{"reason": "a", "answer_1": false} and then {"reason": "b", "answer_1": true}',
    "quotes": 'It says {"reason": "a", "answer_1": true}, which I shall not follow.',
    "extra": '{"reason": "a", "answer_1": true, "bonus": true}',
}
"""What is said of a completion with such a word."""


def judged(request: dict[str, Any], name: str = "COMPLETION") -> str:
    """What stands between the marks of a request."""
    found = re.search(rf"<<<({name}-[0-9a-f]{{12}})\n(.*)\n\1>>>", request["messages"][1]["content"], re.DOTALL)
    assert found, request
    return found[2]


def verdict(request: dict[str, Any], text: str) -> str:
    asked = dict(re.findall(r'^"(\w+)": .*\(([^()]*)\)$', request["messages"][1]["content"], re.MULTILINE))
    if "copy" in text:
        return text.partition("copy ")[2]
    if (word := next((word for word in REFUSED if word in text), None)) is not None:
        return REFUSED[word]
    grade = int(re.search(r"grade:(\d+)", text)[1]) if "grade:" in text else 0  # type: ignore[index]
    answers: dict[str, Any] = {"reason": "it says so"}
    answers |= {name: grade if "whole number" in kind else grade > 5 for name, kind in asked.items()}
    return json.dumps(answers)


@contextmanager
def judge_server(port: int = 0) -> Iterator[Server]:
    """Serve while inside."""
    server = Server(port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def serve_and_die(requests: int) -> None:
    """Print the port, serve, and kill this process once so many requests have come."""
    with judge_server() as server:
        print(server.server_address[1], flush=True)
        while len(server.requests) < requests:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
