"""A server of the S3 protocol on the loopback, and a proxy in front of it that fails on purpose."""

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIexample", "AWS_REGION": "us-east-1"}
Fault = Callable[["Request"], str]


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with an empty bucket."""
    import boto3  # pyright: ignore[reportMissingImports]
    from moto.server import ThreadedMotoServer  # pyright: ignore[reportMissingImports]

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        client = boto3.client("s3", endpoint_url=address, aws_access_key_id="a", aws_secret_access_key="b")
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield address
    finally:
        server.stop()


class Request:
    """A request that the proxy has received."""

    def __init__(self, method: str, path: str, number: int) -> None:
        self.method, self.path, self.number = method, path, number


class Proxy:
    """Passes requests on to `upstream`, unless `fault` names something else: cut, refuse, error, slow or flip.

    "cut" closes the connection in the middle of the answer, "refuse" before the request is passed on, and "flip"
    changes a byte of the answer.
    """

    def __init__(self, upstream: str) -> None:
        self.fault: Fault = lambda request: ""
        self.injected: list[str] = []
        proxy, target, counter = self, upstream.removeprefix("http://"), iter(range(1_000_000))

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault(Request(self.command, self.path, next(counter)))
                if fault:
                    proxy.injected.append(fault)
                if fault == "refuse":
                    self.close_connection = True
                    return
                if fault == "error":
                    self._answer(500, {"Content-Type": "application/xml"}, b"<Error><Code>InternalError</Code></Error>")
                    return
                if fault == "slow":
                    time.sleep(0.3)
                connection = http.client.HTTPConnection(target, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                answer = connection.getresponse()
                content, headers = answer.read(), dict(answer.getheaders())
                connection.close()
                if fault == "flip" and content:
                    content = bytes([content[0] ^ 1]) + content[1:]
                if self.command != "HEAD":
                    headers["Content-Length"] = str(len(content))
                self._answer(answer.status, headers, content[: len(content) // 2] if fault == "cut" else content)
                if fault == "cut":
                    self.close_connection = True

            def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

            def handle(self) -> None:
                try:
                    super().handle()
                except (ConnectionError, TimeoutError):  # the client was killed
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
