"""uvicorn's HTTP connection with a time limit for the head of each request, and with refusals as JSON."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ecnn.serving.guard import Refusal, busy


class Connection(H11Protocol):
    """A connection that is closed if the head of a request, also of the first, takes over `timeout_keep_alive` seconds.

    uvicorn itself waits for ever for the first byte of a connection, and for the rest of a head that has begun.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.limit_concurrency = None  # uvicorn's refusal is not JSON: `handle_events` sends ours instead
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()  # cancels the timeout once a head is complete

    def handle_events(self) -> None:
        most = self.config.limit_concurrency
        if most is not None and len(self.connections) > most:
            refusal = busy(f"{most} connections are open, and no more are taken: try again.")
            refusal.headers["connection"] = "close"
            self.app = refusal.response()
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = Refusal(400, "the request is not valid HTTP.", {"connection": "close"}).response()
            head = h11.Response(status_code=400, headers=answer.raw_headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
