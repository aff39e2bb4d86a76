"""The HTTP interface of a server: /predict, /generate, /model, /health, /ready and /metrics as an ASGI app."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from jax_trainer.optional_import import from_extra
from jax_trainer.serving.artifact import ExportedModel
from jax_trainer.serving.batching import Batcher, CompiledSizes, QueueFull
from jax_trainer.serving.metrics import ServerMetrics
from jax_trainer.serving.text import TextModel
from jax_trainer.serving.wire import JSON, NPY, Refused, decode, encode, expected_form
from jax_trainer.settings import AtLeast, Settings

LARGE = 1 << 16  # bytes from which a body is read by a thread, so that other requests do not wait for it
LOG = logging.getLogger("jax_trainer")
DISCONNECTED = 499  # the usual code for a client that is gone


@dataclass
class ServeConfig(Settings):
    """The limits of a server.

    Args:
        max_batch: examples per batch, and per request.
        max_delay: seconds that the first request of a batch waits for others; 0: only while another batch runs.
        max_queue: examples that may wait; more are refused with 503.
        max_body: bytes of the body of a request; a larger one is refused with 413.
        max_tokens: tokens that a request may generate.
        max_connections: open connections; more are refused with 503.
        timeout: seconds for receiving a request, for its prediction, and for sending the answer, each.
        grace: seconds for finishing requests after SIGTERM.
    """

    max_batch: Annotated[int, AtLeast(1)] = 64
    max_delay: Annotated[float, AtLeast(0)] = 0.0
    max_queue: Annotated[int, AtLeast(1)] = 1024
    max_body: Annotated[int, AtLeast(1)] = 1 << 24
    max_tokens: Annotated[int, AtLeast(1)] = 1024
    max_connections: Annotated[int, AtLeast(1)] = 512
    timeout: Annotated[float, AtLeast(0.001)] = 30.0
    grace: Annotated[float, AtLeast(0)] = 30.0


class PredictApp:
    """The app of one model.

    Args:
        model: the model.
        config: the limits.
        compiled: the model compiled for batches of up to `config.max_batch` examples.
        text: its vocabulary, if it is a language model.
    """

    def __init__(
        self, model: ExportedModel, config: ServeConfig, compiled: CompiledSizes, text: TextModel | None = None
    ) -> None:
        self.model, self.config, self._text = model, config, text
        self.metrics = ServerMetrics(compiled.sizes, lambda: self._batcher.waiting)
        limits: dict[str, Any] = {"max_delay": config.max_delay, "max_queue": config.max_queue}
        self._batcher = Batcher(compiled, **limits, on_batch=self.metrics.add_batch)
        self._most = compiled.most
        self._is_open = False

    def asgi(self) -> Any:
        """The app for an ASGI server."""
        with from_extra("serve"):
            from starlette.applications import Starlette
            from starlette.routing import Route

        def get(path: str, respond: Any) -> Any:
            return Route(path, respond, methods=["GET"])

        routes = [
            Route("/predict", partial(self._answered, self._predict), methods=["POST"]),
            Route("/generate", partial(self._answered, self._generate), methods=["POST"]),
            get("/model", self._describe),
            get("/health", self._health),
            get("/ready", self._readiness),
            get("/metrics", self._show_metrics),
        ]
        return _sending_within(self.config.timeout, Starlette(routes=routes, lifespan=self._lifespan))

    @asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        work = asyncio.create_task(self._batcher.work())
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._batcher.close()
            await work

    async def _answered(self, answer: Any, request: Any) -> Any:
        """The answer to a request, or the reason why there is none; both are counted."""
        started = time.monotonic()
        try:
            respond = await answer(request)
        except Refused as refused:
            is_input = request.url.path == "/predict" and refused.status in (400, 415, 422)
            extra = {"expected": expected_form(self.model.inputs)} if is_input else {}
            headers = {"Retry-After": "1"} if refused.status == 503 else {}
            respond = _json({"error": refused.reason, **extra}, refused.status, headers)
        self.metrics.add_request(respond.status_code, time.monotonic() - started)
        return respond

    async def _predict(self, request: Any) -> Any:
        kind = self._answer_kind(request)
        body = await self._body(request)
        media_type = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        read = partial(decode, body, media_type, self.model.inputs, self._most)
        inputs, count = await asyncio.to_thread(read) if len(body) > LARGE else read()
        async with self._limited():
            outputs = await self._batcher.run(inputs, count)
        size = sum(array.nbytes for array in outputs.values())
        content = await asyncio.to_thread(encode, outputs, kind) if size > LARGE else encode(outputs, kind)
        return _response(content, 200, kind)

    async def _generate(self, request: Any) -> Any:
        if self._text is None:
            raise Refused(404, "This model has no vocabulary, so it cannot continue a text. Use /predict.")
        prompt = self._text.prompt(await self._body(request), self.config.max_tokens)
        async with self._limited():
            text, tokens = await self._text.generate(prompt, self._batcher.run)
        return _json({"text": text, "tokens": tokens})

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Around predictions: limits their time, and says why there is none."""
        try:
            async with asyncio.timeout(self.config.timeout):
                yield
        except QueueFull:
            raise Refused(503, f"More than {self.config.max_queue} examples wait. Try again later.") from None
        except TimeoutError:
            raise Refused(504, f"The prediction took longer than {self.config.timeout:g} seconds.") from None
        except Exception as error:
            LOG.exception("The program failed.")
            raise Refused(500, f"The program failed: {type(error).__name__}.") from error

    async def _body(self, request: Any) -> bytes:
        """The body of a request, of limited size, received in limited time."""
        from starlette.requests import ClientDisconnect

        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "Compressed bodies are not supported. Send it without Content-Encoding.")
        length = request.headers.get("content-length", "0")
        pieces, size = [], int(length) if length.isdigit() else 0
        self._check_size(size)
        size = 0
        try:
            async with asyncio.timeout(self.config.timeout):
                async for piece in request.stream():
                    size += len(piece)
                    self._check_size(size)
                    pieces.append(piece)
        except TimeoutError:
            raise Refused(408, f"The request took longer than {self.config.timeout:g} seconds to arrive.") from None
        except ClientDisconnect:
            raise Refused(DISCONNECTED, "The client has closed the connection.") from None
        return b"".join(pieces)

    def _check_size(self, size: int) -> None:
        if size > self.config.max_body:
            raise Refused(413, f"The body has more than {self.config.max_body} bytes. Split the request.")

    def _answer_kind(self, request: Any) -> str:
        if NPY not in request.headers.get("accept", ""):
            return JSON
        if len(self.model.outputs) > 1:
            raise Refused(406, f"{NPY} has one array, but the model has {len(self.model.outputs)} outputs. Use {JSON}.")
        return NPY

    async def _describe(self, request: Any) -> Any:
        shown = ("model", "inputs", "outputs", "classes", "source", "text")
        return _json({name: self.model.manifest[name] for name in shown if name in self.model.manifest})

    async def _health(self, request: Any) -> Any:
        return _json({"status": "alive"})

    async def _readiness(self, request: Any) -> Any:
        started = self._batcher.started
        is_stuck = started is not None and time.monotonic() - started > self.config.timeout
        is_ready = self._is_open and not is_stuck
        return _json({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def _show_metrics(self, request: Any) -> Any:
        return _response(self.metrics.text().encode(), 200, "text/plain; version=0.0.4")


def _sending_within(seconds: float, app: Any) -> Any:
    """`app` that gives up a client that does not read its answer."""

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        async def timed(message: Any) -> None:
            async with asyncio.timeout(seconds):
                await send(message)

        await app(scope, receive, timed if scope["type"] == "http" else send)

    return limited


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    return _response(json.dumps(data).encode(), status, JSON, headers)


def _response(content: bytes, status: int, kind: str, headers: dict[str, str] | None = None) -> Any:
    from starlette.responses import Response

    return Response(content, status, headers, kind)
