"""Engines for tests: instances that only heartbeat, and a vLLM that replays recorded pages."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from moorage.v1 import scheduler_pb2 as pb
from tests.integration.processes import PATIENCE_S, Api

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"
#: Between two heartbeats, in seconds.
INTERVAL_S = 0.2


class Engines:
    """Heartbeats for idle instances, `blocks` of 16 tokens each, while the block lasts."""

    def __init__(self, api: Api, *names: str, pool: str = "default", blocks: int = 64) -> None:
        self._api, self._names, self._pool, self._blocks = api, names, pool, blocks
        self._stop = threading.Event()
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def beat(self) -> pb.HeartbeatResponse:
        """Reports every instance once."""
        self._sequence += 1
        snapshots = [
            pb.InstanceSnapshot(
                instance_id=name,
                endpoint=f"http://{name}:8000",
                incarnation="1",
                sequence=self._sequence,
                state=pb.INSTANCE_STATE_SERVING,
                block_size=16,
                total_blocks=self._blocks,
                used_blocks=0,
                max_context_tokens=16 * self._blocks,
            )
            for name in self._names
        ]
        request = pb.HeartbeatRequest(pool=self._pool, instances=snapshots)
        return self._api.scheduler.Heartbeat(request, timeout=PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.beat()
            except grpc.RpcError:
                # A store or a server that is away is part of what is tested.
                continue


class ReplayedEngine:
    """Serves one recorded metrics page at a time, and a context limit. It can go away and come back."""

    def __init__(self) -> None:
        self.show("lifecycle_00")
        self._server = self._listen(0)
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def show(self, name: str) -> None:
        """Replaces the page."""
        [file] = RECORDINGS.glob(f"{name}_*.txt")
        self.page = file.read_bytes()

    def fall_silent(self) -> None:
        """Keeps its port, and answers nobody."""
        self._server.shutdown()

    def leave(self) -> None:
        """Nobody listens at its port any more."""
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        """Answers again, at the same address."""
        self._server.server_close()
        self._server = self._listen(self.port)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                models = json.dumps({"data": [{"id": "tiny", "max_model_len": 8192}]}).encode()
                body = {"/metrics": engine.page, "/v1/models": models, "/health": b""}.get(self.path)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                """Keeps quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server
