"""What stands before the application: who may ask, how much, how many at once and for how long."""

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

#: Nothing is loaded from elsewhere, nothing runs that is not a file of ours, and no other site may look in.
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
    """A request that is not served: its status, and one sentence."""

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers or {}

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.sentence}, self.status, self.headers)


def busy(sentence: str, status: int = 503) -> Refusal:
    """A refusal of what may be asked again in a moment."""
    return Refusal(status, sentence, {"retry-after": "1"})


def ending() -> Refusal:
    """The refusal of what was under way when the server was told to end."""
    return busy("the server is ending.")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Refuses what must not reach the application.

    Args:
        app: the application.
        limits: what is refused beyond.
        only_local: the server listens on a loopback address, so that every request must name one as its host. A name
            that somebody else's DNS points at this machine (DNS rebinding) is refused.
        slots: by path, how many requests may be under way at the same time.
    """

    def __init__(self, app: ASGIApp, *, limits: Limits, only_local: bool, slots: dict[str, int]) -> None:
        self.app, self.limits, self.only_local, self.slots = app, limits, only_local, slots
        self.under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves the body out
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
            refusal = (
                error if isinstance(error, Refusal) else ending()
            )  # nothing else cancels a whole request
            if not has_started:
                await refusal.response()(scope, receive, send_with_headers)

    def _check_sender(self, headers: MutableMapping[str, str]) -> None:
        """Raises a Refusal of a request that another site, or another name of this machine, made a browser send."""
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
        """Lets the application answer, if there is room for one more request, within its time."""
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
        """The whole body, which may come in chunks of which no header says how many there are."""
        most = self.limits.request_bytes
        refusal = Refusal(413, f"the body may have {most:,} bytes, and this one has more.")
        declared = _headers(scope["headers"]).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > 2 * most:
            refusal.headers["connection"] = "close"  # rather than read all of it
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
            # A little too much is read to its end, so that the sender is there to hear the answer.
            refusal.headers |= {"connection": "close"} if more else {}
            raise refusal
        return b"".join(parts)


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin1").lower(): value.decode("latin1") for name, value in pairs}


def _once(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, to be read again."""
    is_read = False

    async def again() -> Any:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
