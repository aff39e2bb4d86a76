import gzip
import hashlib
import io
import shutil
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.datasets.files import DownloadError, FileSet, fetch, sha256_of, unpack_tar

CONTENT = bytes(range(256)) * 1000
SUM = hashlib.sha256(CONTENT).hexdigest()
OTHER_SUM = "0" * 64


class Server(ThreadingHTTPServer):
    """A real host over TLS on this machine."""

    answers: dict[str, Any]

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that refuse the certificate or hang up are what these tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        status, headers, body, after = self.server.answers.get(self.path, (404, {}, b"", None))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if after is not None:
            self.wfile.flush()
            after()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, and no certificate can be made for a local host")
    folder = tmp_path_factory.mktemp("certificate")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return key, cert


@pytest.fixture
def server(certificate, monkeypatch) -> Iterator[Server]:
    key, cert = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    monkeypatch.setenv("no_proxy", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Server(("localhost", 0), Handler) as running:
        running.answers = {}
        running.socket = context.wrap_socket(running.socket, server_side=True)
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def answer(body: bytes, *, status: int = 200, length: int | None = None, after: Any = None, **headers: str) -> tuple:
    headers = {"Content-Length": str(len(body) if length is None else length), **headers}
    return status, headers, body, after


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_is_fetched_over_https(server):
    server.answers["/file"] = answer(CONTENT)
    assert fetch(f"{server.url}/file", sha256=SUM) == CONTENT


def test_of_a_gz_file_the_content_is_checked_however_it_was_packed(server):
    for level in (1, 9):
        server.answers["/file.gz"] = answer(gzip.compress(CONTENT, level))
        assert fetch(f"{server.url}/file.gz", sha256=SUM, unpack_gzip=True) == CONTENT


def test_the_checksum_of_a_file_is_that_of_its_content(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT))
    assert sha256_of(tmp_path / "file") == sha256_of(tmp_path / "file.gz") == SUM


def test_a_wrong_checksum_is_an_error_with_both(server):
    server.answers["/file"] = answer(CONTENT)
    with pytest.raises(DownloadError, match=f"/file has the sha256 {SUM}, .*{OTHER_SUM}"):
        fetch(f"{server.url}/file", sha256=OTHER_SUM)


def test_other_addresses_than_https_are_refused():
    for url in ("http://localhost/file", "file:///etc/hostname", "ftp://localhost/file", "file"):
        with pytest.raises(ValueError, match=f"https.* '{url}'"):
            fetch(url, sha256=SUM)


def test_a_redirect_is_followed_to_https_only(server):
    server.answers["/file"] = answer(CONTENT)
    server.answers["/moved"] = answer(b"", status=302, Location="/file")
    server.answers["/away"] = answer(b"", status=302, Location=f"http://localhost:{server.server_port}/file")
    assert fetch(f"{server.url}/moved", sha256=SUM) == CONTENT
    with pytest.raises(ValueError, match="https.* 'http://localhost"):
        fetch(f"{server.url}/away", sha256=SUM)


def test_a_host_with_an_unknown_certificate_is_refused(server, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    server.answers["/file"] = answer(CONTENT)
    with pytest.raises(DownloadError, match="/file cannot .*certificate"):
        fetch(f"{server.url}/file", sha256=SUM)


def test_a_host_that_fails_is_an_error(server, subtests):
    failures = {
        "broken off": (answer(CONTENT[:1000], length=len(CONTENT)), False, "incomplete"),
        "status": (answer(b"", status=503), False, "/file cannot .*Service Unavailable"),
        "short gz": (answer(gzip.compress(CONTENT)[:-9]), True, "/file cannot"),
        "no gz": (answer(CONTENT), True, "/file cannot"),
    }
    for name, (given, unpack, message) in failures.items():
        with subtests.test(name):
            server.answers["/file"] = given
            with pytest.raises(DownloadError, match=message):
                fetch(f"{server.url}/file", sha256=SUM, unpack_gzip=unpack)


def test_a_host_that_falls_silent_is_given_up(server):
    over = threading.Event()
    server.answers["/file"] = answer(CONTENT[:1000], length=len(CONTENT), after=lambda: over.wait(20))
    with pytest.raises(DownloadError, match="/file cannot be downloaded: .*timed out"):
        fetch(f"{server.url}/file", sha256=SUM, timeout=0.2)
    over.set()


Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, *, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "") -> Entry:
    made = tarfile.TarInfo(name)
    made.type, made.size, made.linkname = kind, len(data), link
    return made, data


def tar(path: Path, *entries: Entry) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for made, data in entries:
            archive.addfile(made, io.BytesIO(data))
    return path


GOOD = entry("set/a.bin", data=CONTENT)
SUMS = {"a.bin": SUM}


def test_the_named_files_of_an_archive_are_unpacked_and_nothing_else(tmp_path):
    more = entry("set/readme.html", data=b"<p>"), entry("set", kind=tarfile.DIRTYPE)
    assert unpack_tar(tar(tmp_path / "set.tar.gz", *more, GOOD).read_bytes(), SUMS) == {"a.bin": CONTENT}
    link = entry("set/a.bin", kind=tarfile.SYMTYPE, link="/etc/passwd")
    for entries in ([entry("set/readme.html")], [link]):
        with pytest.raises(ValueError, match="does not contain a.bin"):
            unpack_tar(tar(tmp_path / "set.tar.gz", *entries).read_bytes(), SUMS)


def packed_set(address: str) -> FileSet:
    return FileSet(
        names=("a-idx1", "b-idx1"), folders=("raw", "."), sha256={"a-idx1": SUM, "b-idx1": SUM}, address=address
    )


def test_missing_files_of_a_set_are_fetched_into_its_first_folder_with_download(server, tmp_path):
    server.answers = {f"/{name}-idx1.gz": answer(gzip.compress(CONTENT)) for name in "ab"}
    files = packed_set(f"{server.url}/")
    with pytest.raises(FileNotFoundError, match="download: true"):
        files.locate("Letters", tmp_path, download=False)
    assert tree(tmp_path) == {}
    paths = files.locate("Letters", tmp_path, download=True)
    assert paths == [tmp_path / "raw" / "a-idx1", tmp_path / "raw" / "b-idx1"]
    server.answers.clear()
    assert files.locate("Letters", tmp_path, download=True) == paths  # what is there is not fetched again


def test_an_archive_of_a_set_is_fetched_checked_and_unpacked(server, tmp_path):
    archive = tar(tmp_path / "set.tar.gz", GOOD).read_bytes()
    server.answers["/set.tar.gz"] = answer(archive)
    made = {"names": ("a.bin",), "folders": ("set",), "address": f"{server.url}/set.tar.gz"}
    files = FileSet(**made, sha256=SUMS, archive_sha256=hashlib.sha256(archive).hexdigest())
    paths = files.locate("Letters", tmp_path / "data", download=True)
    assert paths == [tmp_path / "data" / "set" / "a.bin"]
    assert tree(tmp_path / "data") == {"set/a.bin": CONTENT}
    for sums in ({"a.bin": OTHER_SUM}, SUMS):
        wrong = FileSet(**made, sha256=sums, archive_sha256=OTHER_SUM if sums is SUMS else files.archive_sha256)
        with pytest.raises(DownloadError, match=OTHER_SUM):
            wrong.locate("Letters", tmp_path / "other", download=True)
    assert not tree(tmp_path / "other")


def test_without_a_network_the_error_names_the_files_and_the_folder(tmp_path):
    with pytest.raises(DownloadError) as caught:
        packed_set("https://nowhere.invalid/").locate("Letters", tmp_path, download=True)
    message = str(caught.value)
    assert "https://nowhere.invalid/a-idx1.gz" in message and "\n" not in message
    assert f"a-idx1, b-idx1 manually, into {tmp_path / 'raw'}" in message
    assert tree(tmp_path) == {}
