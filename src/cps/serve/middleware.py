"""ASGI middleware that checks every request before the application sees it.

It limits the number of concurrent requests, the size of a body and the time a body may take to arrive. It rejects
unknown host names, since a web page elsewhere could point its own name at this server (DNS rebinding). It adds security
headers to every reply.
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

DRAIN_SECONDS = 2.0  # spent on reading the rest of a rejected body, so that the client reads the error
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """Limits of a server: per request, per image, on concurrent requests, and on the seconds a request may take."""

    images: int = 64
    megabytes: int = 32
    megapixels: int = 24
    concurrent_requests: int = 8
    seconds: float = 30.0


class RequestError(Exception):
    """A request is rejected with an HTTP status; the message is one sentence for the client."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class RequestGuard:
    """Wrap an ASGI application and enforce the limits. `hosts` are the accepted host names; None accepts any."""

    def __init__(self, app: App, limits: Limits, hosts: Collection[str] | None = None):
        self.app, self.limits = app, limits
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.active_requests = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request to the application, or reply with an error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        send = _with_security_headers(send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_host(headers.get("host", ""))
            if scope["method"] not in ("POST", "PUT", "PATCH"):
                return await self.app(scope, receive, send)
            await self._handle_body(scope, headers, receive, send)
        except RequestError as error:
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await _drain(receive)
            await _send_error(send, error)

    async def _handle_body(
        self, scope: MutableMapping[str, Any], headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        if self.active_requests >= self.limits.concurrent_requests:
            raise RequestError(
                503, f"The server is busy with {self.active_requests} requests, its maximum: try again soon."
            )
        self.active_requests += 1
        try:
            body = await self._read_body(headers, receive)
            if body is not None:
                await self.app(scope, _replay(body, receive), send)
        finally:
            self.active_requests -= 1

    def _check_host(self, host: str) -> None:
        name = host[: host.rindex(":")] if host.rpartition(":")[2].isdecimal() else host
        if self.hosts is not None and name.strip("[]").lower() not in self.hosts:
            raise RequestError(
                400, f"Unknown host name '{name[:100]}': use the address that the server was started with."
            )

    async def _read_body(self, headers: dict[str, str], receive: Receive) -> bytes | None:
        """Return the whole body, or None if the client has disconnected."""
        max_bytes = self.limits.megabytes * 2**20
        declared = headers.get("content-length", "0")
        too_large = RequestError(
            413, f"The request is larger than {self.limits.megabytes} MiB: send fewer or smaller images."
        )
        if declared.isdecimal() and int(declared) > max_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise RequestError(
                408,
                f"The images did not arrive within {self.limits.seconds:g} seconds: send fewer or smaller images.",
            ) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that gives the whole body first, then whatever the client sends."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _with_security_headers(send: Send) -> Send:
    """Return a send function that adds the security headers."""
    extra = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return send_with_headers


async def _drain(receive: Receive) -> None:
    """Read the rest of a body and discard it."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


async def _send_error(send: Send, error: RequestError) -> None:
    body = json.dumps({"error": str(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
