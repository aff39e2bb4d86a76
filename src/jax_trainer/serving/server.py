"""`serve`: an HTTP server for an exported model, until SIGTERM or Ctrl-C."""

import logging
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jax_trainer.optional_import import from_extra
from jax_trainer.serving.app import PredictApp, ServeConfig
from jax_trainer.serving.artifact import ExportedModel, ExportError, load_export
from jax_trainer.serving.batching import CompiledSizes
from jax_trainer.serving.text import TextModel

BACKLOG = 2048  # connections that the system holds until they are accepted
KEEP_ALIVE = 5.0  # seconds that an idle connection is kept
LOG = logging.getLogger("jax_trainer")


class ServeSummary(NamedTuple):
    """What a server did until it was stopped.

    Args:
        requests: requests for predictions.
        examples: examples that were predicted.
        failed: requests that were answered with an error.
    """

    requests: int
    examples: int
    failed: int


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    config: ServeConfig | None = None,
    on_start: Callable[[str, ExportedModel], None] = lambda address, model: None,
) -> ServeSummary:
    """Serves an exported model over HTTP until SIGTERM or Ctrl-C; requests that were accepted are answered first.

    Only the StableHLO program of the export runs: no class of the run is imported. It needs
    `pip install 'jax-trainer[serve]'`.

    Args:
        path: the folder that `export` has written.
        host: the address to listen on; "0.0.0.0" is every one, also from outside of this machine.
        port: the port; 0: a free one.
        config: the limits.
        on_start: called with the address and the model as soon as requests are accepted.
    """
    config = ServeConfig() if config is None else config
    uvicorn = _uvicorn()
    listening = _bound(host, port)  # before the model is compiled: an address in use shows now
    with listening:
        model = load_export(path)
        if odd := [spec for spec in (*model.inputs, *model.outputs) if not spec.is_batched]:
            raise ExportError(f"{odd[0]} has no row per example, so requests cannot share a batch.")
        text = TextModel(model, Path(path)) if "text" in model.manifest else None
        app = PredictApp(model, config, CompiledSizes(model, config.max_batch), text)
        address = "http://{}:{}".format(*listening.getsockname()[:2])
        options: dict[str, Any] = {"limit_concurrency": config.max_connections + 1, "timeout_keep_alive": KEEP_ALIVE}
        options |= {"timeout_graceful_shutdown": config.grace, "backlog": BACKLOG, "access_log": False}
        options |= {"log_config": None, "ws": "none", "server_header": False, "lifespan": "on"}
        protocol = _timed_protocol(config.timeout)
        server = _server_class()(uvicorn.Config(app.asgi(), http=protocol, **options))
        server.on_start = lambda: on_start(address, model)
        server.run(sockets=[listening])
    done = app.metrics.requests
    failed = sum(count for code, count in done.items() if code >= 400)
    return ServeSummary(done.total(), app.metrics.examples, failed)


def _uvicorn() -> Any:
    with from_extra("serve"):
        import uvicorn
    return uvicorn


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise OSError(
            error.errno, f"Cannot listen on {host}:{port}: {error.strerror}. Choose another `port`."
        ) from None
    return made


@cache
def _server_class() -> Any:
    class Server(_uvicorn().Server):
        """A server that ends with the exit code of the command after a signal, instead of raising the signal again."""

        on_start: Callable[[], None]

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            self.on_start()

        def handle_exit(self, sig: int, frame: Any) -> None:
            self.force_exit = self.should_exit  # the second signal does not wait for requests
            self.should_exit = True

    return Server


def _timed_protocol(seconds: float) -> Any:
    """HTTP/1.1 of uvicorn, which closes a connection whose request does not arrive in time."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

        def _is_waiting(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _watch(self) -> None:
            if not self._is_waiting():
                self._stop()
            elif self.timer is None:
                self.timer = self.loop.call_later(seconds, self._expire)

        def _expire(self) -> None:
            self.timer = None
            if self._is_waiting():
                self.transport.close()

        def _stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return TimedProtocol
