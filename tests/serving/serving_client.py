"""An ASGI client: sends requests to an app in this process, without a socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The JSON value of the body."""
        return json.loads(self.body)


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[None]:
    """Starts an app, and shuts it down."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    work = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
        await work


async def ask(
    app: Any, method: str, path: str, body: bytes | str = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """The answer to a request."""
    content = body.encode() if isinstance(body, str) else body
    sent: list[dict[str, Any]] = [{"type": "http.request", "body": content, "more_body": False}]
    received: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return sent.pop() if sent else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        received.append(message)

    given = {"content-length": str(len(content)), **(headers or {})}
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [(name.encode(), value.encode()) for name, value in given.items()], "http_version": "1.1"}
    scope |= {"server": ("localhost", 80), "client": ("localhost", 1), "scheme": "http", "root_path": ""}
    await app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in received[0]["headers"]}
    return Answer(received[0]["status"], found, b"".join(one.get("body", b"") for one in received[1:]))
