"""Runs the application in uvicorn until it is told to end."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from ecnn.checks import check_count
from ecnn.errors import InputError
from ecnn.serving.app import Service, make_app
from ecnn.serving.connections import Connection
from ecnn.serving.guard import is_loopback
from ecnn.serving.limits import Limits
from ecnn.serving.subject import Subject

_GRACE_SECONDS = 5


def serve(
    subject: Subject,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    on_ready: Callable[[str, bool], object] | None = None,
    **options: Any,
) -> None:
    """Serves a model until Ctrl-C or SIGTERM.

    Args:
        subject: the model.
        host: the address to listen at; any but a loopback address lets other machines in.
        port: 0 takes a free one.
        limits: beyond which requests are refused; None for the defaults of `Limits`.
        on_ready: called with the URL once the server listens, and with whether only this machine reaches it.
        options: of `make_app`.
    """
    limits = limits or Limits()
    check_count("port", port, least=0, most=65535)
    is_local = is_loopback(host)
    app = make_app(subject, limits=limits, only_local=is_local, **options)
    # Its messages about bad forms are not needed: the sender gets an answer.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    with listen(host, port) as listener:
        if on_ready is not None:
            shown = f"[{host}]" if ":" in host else host
            on_ready(f"http://{shown}:{listener.getsockname()[1]}", is_local)
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",  # with it, a second Ctrl-C would end uvicorn with a traceback
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=_GRACE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        try:
            _Server(config, app.state.service).run(sockets=[listener])
        finally:
            app.state.service.close()


class _Server(uvicorn.Server):
    """A uvicorn server that stops running attacks, and takes no further work, as soon as it is told to end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.end()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; InputError if the address or port cannot be used."""
    try:
        is_six = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_six = False
    # asyncio sets TCP_NODELAY only if the protocol is given; without it, answers wait 40 ms for an acknowledgement.
    listener = socket.socket(
        socket.AF_INET6 if is_six else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except (OSError, UnicodeError) as error:
        listener.close()
        raise InputError(
            f"{host} port {port} cannot be listened at ({getattr(error, 'strerror', None) or error}): choose another "
            "with --host or --port."
        ) from error
    return listener
