"""ASGI middleware that refuses requests: by sender, by size, by how many are under way, and by time."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ecnn.serving.limits import Limits

#: The page loads nothing from other hosts and runs only our scripts; other sites can neither frame nor read it.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Refusal(Exception):  # noqa: N818 an answer, not a fault
    """Raised to refuse a request, with an HTTP status and one sentence."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers or {}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.sentence}, self.status, self.headers)


def busy(sentence: str, status: int = 503) -> Refusal:
    """A refusal of a request that may be sent again in a moment."""
    return Refusal(status, sentence, {"retry-after": "1"})


def ending() -> Refusal:
    """The refusal of a request that was under way when the server was told to end."""
    return busy("the server is ending.")


def is_loopback(host: str) -> bool:
    """Whether the address is "localhost" or a loopback address, which only this machine reaches."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Middleware that refuses requests from other sites, too large or too many ones, and adds security headers.

    Args:
        app: the application.
        limits: beyond which requests are refused.
        only_local: whether the server listens on a loopback address. Then the Host header of every request must be one:
            a name that a stranger's DNS server points at this machine (DNS rebinding) is refused.
        slots: how many POST requests may be under way at the same time, by path.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, only_local: bool, slots: dict[str, int]) -> None:
        self.app, self.limits, self.only_local, self.slots = app, limits, only_local, slots
        self.under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body of the answer
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                names = {name for name, _ in message["headers"]}
                added = [(name.encode(), text.encode()) for name, text in _HEADERS.items()]
                message["headers"] = [
                    *message["headers"],
                    *(entry for entry in added if entry[0] not in names),
                ]
            await send(message)

        try:
            self._check_sender(_headers(scope["headers"]))
            await self._admit(scope, receive, send_with_headers)
        except (Refusal, asyncio.CancelledError) as error:
            # A whole request is cancelled only when the server ends.
            refusal = error if isinstance(error, Refusal) else ending()
            if not has_started:
                await refusal.response()(scope, receive, send_with_headers)

    def _check_sender(self, headers: MutableMapping[str, str]) -> None:
        """Raises a Refusal if another site made a browser send the request, or if its Host is not a loopback address.

        The second only counts with `only_local`.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            same = origin is None or urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            raise Refusal(403, "the Host or Origin of the request is no address.") from None
        if self.only_local and not is_loopback(name):
            raise Refusal(403, f"this server answers only to localhost, not to {host[:100]!r}.")
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode")
        if not same or (site in ("cross-site", "same-site") and mode != "navigate"):
            raise Refusal(403, "requests from other sites are not served.")

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on if fewer than `slots` are under way on its path; a Refusal if there is no room or time.

        Only POST requests on the paths of `slots` are counted and timed.
        """
        path = scope["path"]
        if path not in self.slots or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        if self.under_way[path] >= self.slots[path]:
            raise busy(
                f"{self.slots[path]} such requests are under way, and no more are taken: try again.", 429
            )
        self.under_way[path] += 1
        try:
            body = await self._read_body(scope, receive)
            async with asyncio.timeout(self.limits.seconds):
                await self.app(scope, _once(body, receive), send)
        except TimeoutError:
            raise busy(f"the request was not answered within {self.limits.seconds:g} seconds.") from None
        finally:
            self.under_way[path] -= 1

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. It may come in chunks without a declared length, so its size is checked while it arrives."""
        most = self.limits.request_bytes
        refusal = Refusal(413, f"the body may have {most:,} bytes, and this one has more.")
        declared = _headers(scope["headers"]).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > 2 * most:
            refusal.headers["connection"] = "close"  # instead of reading all of it
            raise refusal
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.limits.upload_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "the body is cut short.")
                    size += len(message.get("body", b""))
                    if size > 2 * most:
                        break
                    if size <= most:
                        parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            sentence = f"the body did not arrive within {self.limits.upload_seconds:g} seconds."
            raise Refusal(408, sentence, {"connection": "close"}) from None
        if size > most:
            # A body up to twice too large was read to its end, since clients read no answer while they still send.
            refusal.headers |= {"connection": "close"} if more else {}
            raise refusal
        return b"".join(parts)


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin1").lower(): value.decode("latin1") for name, value in pairs}


def _once(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first gives the body, which was read already, and then goes on with the given one."""
    is_read = False

    async def again() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
