"""An engine of others, as bad as a test wants it: python -I -S scripted_server.py PORT [FAULT...]

Faults: never-ready; dies-at-start; dies-after=N (requests); deaf (to SIGTERM, with a child that is
too). It has no model, two slots, and answers "ab".
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = dict(word.partition("=")[::2] for word in sys.argv[2:])
SERVED: list[int] = []
TOKEN_SECONDS = 0.02
SLOTS = threading.Semaphore(2)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = json.dumps({"data": [{"id": "ab", "max_model_len": 512}]})
        texts = {"/health": "", "/v1/models": models}
        status = 200 if self.path in texts else 404
        if self.path == "/health" and "never-ready" in FAULTS:
            status = 503
        self.answer(status, texts.get(self.path, ""))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.answer(404, "")
        SERVED.append(1)
        if len(SERVED) > int(FAULTS.get("dies-after") or 1 << 30):
            print("out of luck", flush=True)
            self.server.socket.close()  # type: ignore[attr-defined]
            self.connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.3)  # its connections are gone before it is
            os._exit(7)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with SLOTS:
            for number in range(body["max_tokens"]):
                time.sleep(TOKEN_SECONDS)
                self.event({"choices": [{"index": 0, "text": "ab "}], "usage": usage(number + 1)})
        last = {"index": 0, "text": "", "finish_reason": "length"}
        self.event({"choices": [last], "usage": usage(body["max_tokens"])})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def event(self, value: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps({"model": "ab"} | value).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        return


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 12, "completion_tokens": tokens, "total_tokens": 12 + tokens}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    print("loading", flush=True)
    if "dies-at-start" in FAULTS:
        sys.exit("no such model")
    if "deaf" in FAULTS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"])
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
