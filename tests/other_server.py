"""A small server of another kind that speaks OpenAI's protocol, with known delays: what a load generator
measures can be checked on it.

The prompt says how it behaves: "plain" writes five words; "long" a hundred; "uncounted" sends no usage;
"refused" is answered with 400; "cut" breaks off in the middle; "silent" never ends; "late" says an error
inside the stream.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIRST_S, WORD_S = 0.08, 0.02  # before the first word, and before each further one
METRICS = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{model_name="m"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_by_drafter_total{{model_name="m",drafter="d",position="0"}} 99
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]
    has_metrics = True

    def log_message(self, *parts: Any) -> None:
        """Tests read what they need."""

    def do_GET(self) -> None:
        num = len(self.asked)
        if self.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": "m"}]}))
        elif self.path == "/metrics" and self.has_metrics:
            self._send(200, METRICS.format(drafts=10 * num, drafted=30 * num, accepted=15 * num))
        else:
            self._send(404, "there is nothing here")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        if prompt == "refused":
            self._send(400, json.dumps({"error": {"message": "such prompts are\nrefused"}}))
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            self._write(prompt)
        except OSError:  # the client has left
            self.close_connection = True

    def _write(self, prompt: str) -> None:
        num_words = 100 if prompt == "long" else 5
        self._event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
        for i in range(num_words):
            time.sleep(WORD_S if i else FIRST_S)
            if i == 2 and prompt == "cut":
                self.close_connection = True
                return
            if i == 2 and prompt == "silent":
                time.sleep(60)
            if i == 2 and prompt == "late":
                self._event({"error": {"message": "the engine died"}})
            self._event({"choices": [{"delta": {"content": "word "}, "finish_reason": None}]})
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if prompt != "uncounted":
            self._event(
                {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2 * num_words}}
            )  # two tokens a piece
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\r\n\r\n".encode()
        self._chunk(data[:9])  # events need not arrive whole
        self._chunk(data[9:])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def other_server(has_metrics: bool = True) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the bodies it is asked with."""
    asked: list[dict[str, Any]] = []
    server = Quiet(("127.0.0.1", 0), type("Own", (Handler,), {"asked": asked, "has_metrics": has_metrics}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
