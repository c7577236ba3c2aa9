"""The gate: what a request must pass before anything looks at it.

It bounds the requests at work, the bytes of a body and the seconds it may take to arrive, refuses names of other hosts
(a page elsewhere could otherwise point its own name here), and gives every reply the headers that keep browsers strict.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PATIENCE = 2.0  # seconds to let go of a body that is not wanted, so that the sender gets to read why
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """What the server accepts: in one request, at once, and for how long."""

    images: int = 64
    megabytes: int = 32
    megapixels: int = 24
    at_once: int = 8
    seconds: float = 30.0


class Refused(Exception):
    """A request is not answered; the message is one sentence for its sender."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class RequestGuard:
    """An ASGI application around another. `hosts` are the names it answers to; None is any."""

    def __init__(self, app: App, limits: Limits, hosts: Collection[str] | None = None):
        self.app, self.limits = app, limits
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.at_work = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let a request through, or say in one sentence why not."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        send = _strict(send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_host(headers.get("host", ""))
            if scope["method"] not in ("POST", "PUT", "PATCH"):
                return await self.app(scope, receive, send)
            await self._answer(scope, headers, receive, send)
        except Refused as refused:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    await _let_go(receive)
            await _reply(send, refused)

    async def _answer(
        self, scope: MutableMapping[str, Any], headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        if self.at_work >= self.limits.at_once:
            raise Refused(503, f"{self.at_work} requests are at work, which is all this server takes; try again soon")
        self.at_work += 1
        try:
            body = await self._body(headers, receive)
            if body is not None:
                await self.app(scope, _replay(body, receive), send)
        finally:
            self.at_work -= 1

    def _check_host(self, host: str) -> None:
        name = host[: host.rindex(":")] if host.rpartition(":")[2].isdecimal() else host
        if self.hosts is not None and name.strip("[]").lower() not in self.hosts:
            raise Refused(
                400, f"this server does not answer to the name '{name[:100]}'; use the address it was started with"
            )

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes | None:
        """Return the whole body, or None if its sender has gone."""
        most = self.limits.megabytes * 2**20
        declared = headers.get("content-length", "0")
        too_large = Refused(
            413, f"the request is larger than {self.limits.megabytes} MiB; send fewer or smaller images"
        )
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            sentence = f"the images did not arrive within {self.limits.seconds:g} seconds; send fewer or smaller ones"
            raise Refused(408, sentence) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives the body at once, and then whatever comes."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _strict(send: Send) -> Send:
    """Return a function that sends with the headers of every reply."""
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def strictly(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return strictly


async def _let_go(receive: Receive) -> None:
    """Read the rest of a body and keep nothing of it."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


async def _reply(send: Send, refused: Refused) -> None:
    body = json.dumps({"error": str(refused)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
