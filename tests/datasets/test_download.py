import gzip
import hashlib
import io
import os
import shutil
import signal
import ssl
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.datasets.download import DownloadError, fetch, sha256_of, unpack_tar
from jax_trainer.datasets.files import FileSet

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


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_file_is_fetched_over_https_and_nothing_else_is_left(server, tmp_path):
    server.answers["/file"] = answer(CONTENT)
    target = tmp_path / "new" / "folder" / "file"
    assert fetch(f"{server.url}/file", target, sha256=SUM) == target
    assert tree(tmp_path / "new") == {"folder": None, "folder/file": CONTENT}
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("level", [1, 9])
def test_of_a_gz_file_the_content_is_checked_and_stored_however_it_was_packed(server, tmp_path, level):
    server.answers["/file.gz"] = answer(gzip.compress(CONTENT, level))
    fetch(f"{server.url}/file.gz", tmp_path / "file", sha256=SUM, unpack_gzip=True)
    assert tree(tmp_path) == {"file": CONTENT}


def test_the_checksum_of_a_file_is_that_of_its_content(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    (tmp_path / "file.gz").write_bytes(gzip.compress(CONTENT))
    assert sha256_of(tmp_path / "file") == sha256_of(tmp_path / "file.gz") == SUM


def test_a_wrong_checksum_is_an_error_with_both_and_leaves_what_was_there(server, tmp_path):
    server.answers["/file"] = answer(CONTENT)
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ValueError, match=f"/file has the sha256 {SUM}, .*{OTHER_SUM}"):
        fetch(f"{server.url}/file", tmp_path / "file", sha256=OTHER_SUM)
    assert tree(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("url", ["http://localhost/file", "file:///etc/hostname", "ftp://localhost/file", "file"])
def test_other_addresses_than_https_are_refused(tmp_path, url):
    with pytest.raises(ValueError, match=f"https.* '{url}'"):
        fetch(url, tmp_path / "new" / "file", sha256=SUM)
    assert tree(tmp_path) == {}


def test_a_redirect_is_followed_to_https_only(server, tmp_path):
    server.answers["/file"] = answer(CONTENT)
    server.answers["/moved"] = answer(b"", status=302, Location="/file")
    server.answers["/away"] = answer(b"", status=302, Location=f"http://localhost:{server.server_port}/file")
    fetch(f"{server.url}/moved", tmp_path / "file", sha256=SUM)
    with pytest.raises(ValueError, match="https.* 'http://localhost"):
        fetch(f"{server.url}/away", tmp_path / "new" / "file", sha256=SUM)
    assert tree(tmp_path) == {"file": CONTENT}


def test_a_host_with_an_unknown_certificate_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    server.answers["/file"] = answer(CONTENT)
    with pytest.raises(DownloadError, match="/file cannot .*certificate"):
        fetch(f"{server.url}/file", tmp_path / "file", sha256=SUM)
    assert tree(tmp_path) == {}


def test_a_file_with_a_declared_size_above_the_limit_is_refused(server, tmp_path):
    server.answers["/file"] = answer(CONTENT)
    with pytest.raises(ValueError, match="/file has 256000 bytes, .*1000"):
        fetch(f"{server.url}/file", tmp_path / "new" / "file", sha256=SUM, max_bytes=1000)
    assert tree(tmp_path) == {}


def test_a_file_that_turns_out_too_large_is_refused(server, tmp_path):
    server.answers["/file"] = (200, {}, CONTENT, None)
    with pytest.raises(ValueError, match="/file has more than .*1000 bytes"):
        fetch(f"{server.url}/file", tmp_path / "new" / "file", sha256=SUM, max_bytes=1000)
    assert tree(tmp_path) == {}


def test_a_small_gz_file_that_unpacks_to_too_much_is_refused(server, tmp_path):
    server.answers["/file.gz"] = answer(gzip.compress(bytes(50_000_000)))
    with pytest.raises(ValueError, match="more than .*1000000 bytes"):
        fetch(f"{server.url}/file.gz", tmp_path / "new" / "f", sha256=SUM, unpack_gzip=True, max_bytes=1_000_000)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("given", "unpack", "message"),
    [
        (answer(CONTENT[:1000], length=len(CONTENT)), False, "stopped after 1000 of 256000 bytes"),
        (answer(b"", status=503), False, "/file cannot .*Service Unavailable"),
        (answer(gzip.compress(CONTENT)[:-9]), True, "/file did not send"),
        (answer(CONTENT), True, "/file did not send"),
    ],
    ids=["broken off", "status", "short gz", "no gz"],
)
def test_a_host_that_fails_leaves_nothing_behind(server, tmp_path, given, unpack, message):
    server.answers["/file"] = given
    with pytest.raises(DownloadError, match=message):
        fetch(f"{server.url}/file", tmp_path / "new" / "file", sha256=SUM, unpack_gzip=unpack)
    assert tree(tmp_path) == {}


def test_a_host_that_falls_silent_is_given_up(server, tmp_path):
    over = threading.Event()
    server.answers["/file"] = answer(CONTENT[:1000], length=len(CONTENT), after=lambda: over.wait(20))
    with pytest.raises(DownloadError, match="stopped after .* bytes: TimeoutError"):
        fetch(f"{server.url}/file", tmp_path / "new" / "file", sha256=SUM, timeout=0.2)
    over.set()
    assert tree(tmp_path) == {}


def test_an_interrupted_download_leaves_nothing_behind(server, tmp_path):
    over, seen = threading.Event(), []

    def interrupt() -> None:
        while not seen:  # until the client has started to write
            seen.extend(path.name for path in tmp_path.rglob("file"))
        time.sleep(0.1)  # and waits for more: between opening a file and using it, Python would say it is unclosed
        for _ in range(5):  # what comes while Python cleans up behind something is ignored by it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if over.wait(4):
                return

    server.answers["/file"] = answer(CONTENT[:1000], length=len(CONTENT), after=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
    try:
        with pytest.raises(KeyboardInterrupt):
            fetch(f"{server.url}/file", tmp_path / "new" / "file", sha256=SUM)
    finally:
        signal.signal(signal.SIGINT, before)
    over.set()
    assert seen == ["file"] and tree(tmp_path) == {}


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


@pytest.fixture
def cache(tmp_path) -> Path:
    (tmp_path / "cache" / "set").mkdir(parents=True)
    (tmp_path / "cache" / "set" / "a.bin").write_bytes(b"old")
    (tmp_path / "cache" / "set" / "mine.txt").write_bytes(b"mine")
    return tmp_path / "cache"


def test_the_files_that_have_a_checksum_are_unpacked_and_nothing_else(tmp_path):
    more = entry("set/readme.html", data=b"<p>"), entry("set", kind=tarfile.DIRTYPE)
    archive = tar(tmp_path / "set.tar.gz", *more, GOOD)
    unpack_tar(archive, tmp_path / "cache" / "set", sha256=SUMS)
    assert tree(tmp_path / "cache") == {"set": None, "set/a.bin": CONTENT}


def test_a_folder_that_is_there_keeps_its_other_files(tmp_path, cache):
    unpack_tar(tar(tmp_path / "set.tar.gz", GOOD), cache / "set", sha256=SUMS)
    assert tree(cache) == {"set": None, "set/a.bin": CONTENT, "set/mine.txt": b"mine"}


BAD = {
    "parent": (entry("set/../../a.bin", data=CONTENT), "its path leads out of the folder"),
    "windows parent": (entry("set\\..\\..\\a.bin", data=CONTENT), "its path leads out of the folder"),
    "absolute": (entry("/tmp/a.bin", data=CONTENT), "its path is absolute"),
    "drive": (entry("C:/a.bin", data=CONTENT), "its path is absolute"),
    "symlink": (entry("set/a.bin", kind=tarfile.SYMTYPE, link="/etc/passwd"), "it is a link"),
    "hardlink": (entry("set/a.bin", kind=tarfile.LNKTYPE, link="/etc/passwd"), "it is a link"),
    "character device": (entry("set/a.bin", kind=tarfile.CHRTYPE), "not a regular file"),
    "block device": (entry("set/a.bin", kind=tarfile.BLKTYPE), "not a regular file"),
    "fifo": (entry("set/a.bin", kind=tarfile.FIFOTYPE), "not a regular file"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("place", ["before", "after"])
def test_an_archive_with_a_dangerous_entry_changes_nothing(tmp_path, cache, bad, message, place):
    archive = tar(tmp_path / "set.tar.gz", *([bad, GOOD] if place == "before" else [GOOD, bad]))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=f"set.tar.gz contains '.*{message}"):
        unpack_tar(archive, cache / "set", sha256=SUMS)
    assert tree(tmp_path) == before


def test_a_name_with_a_nul_changes_nothing(tmp_path, cache):
    made, data = entry("set/a.bin", data=CONTENT)
    made.pax_headers = {"path": "set/a.bin\0.txt"}
    archive = tar(tmp_path / "set.tar.gz", (made, data))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="its name contains a NUL"):
        unpack_tar(archive, cache / "set", sha256=SUMS)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("entries", "limits", "message"),
    [
        ([GOOD], {"max_bytes": 200_000}, "more than .*200000 bytes"),
        ([entry("x", data=bytes(3_000_000)), GOOD], {"max_bytes": 1_000_000}, "more than .*1000000 bytes"),
        ([entry(f"{n}") for n in range(9)], {"max_members": 8}, "more than .*8 entries"),
        ([GOOD, entry("b.bin")], {}, "does not contain c.bin"),
        (
            [entry("set/a.bin", data=b"other"), entry("c.bin")],
            {},
            f"a.bin in .* has the sha256 .*{SUM}",
        ),
        ([GOOD, entry("again/a.bin", data=CONTENT)], {}, "contains a.bin twice"),
    ],
    ids=["large", "large other", "many", "missing", "checksum", "twice"],
)
def test_an_archive_that_is_not_what_was_expected_changes_nothing(tmp_path, cache, entries, limits, message):
    archive = tar(tmp_path / "set.tar.gz", *entries)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=message):
        unpack_tar(archive, cache / "set", sha256={**SUMS, "c.bin": hashlib.sha256(b"").hexdigest()}, **limits)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5000], lambda data: b"no gzip", lambda data: gzip.compress(data)]
)
def test_a_damaged_archive_changes_nothing(tmp_path, cache, damage):
    noise = entry("set/noise", data=os.urandom(20_000))
    archive = tar(tmp_path / "set.tar.gz", noise, GOOD)
    archive.write_bytes(damage(archive.read_bytes()))
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="set.tar.gz is not"):
        unpack_tar(archive, cache / "set", sha256=SUMS)
    assert tree(tmp_path) == before


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
    assert tree(tmp_path / "data") == {"set": None, "set/a.bin": CONTENT}
    for sums in ({"a.bin": OTHER_SUM}, SUMS):
        wrong = FileSet(**made, sha256=sums, archive_sha256=OTHER_SUM if sums is SUMS else files.archive_sha256)
        with pytest.raises(ValueError, match=OTHER_SUM):
            wrong.locate("Letters", tmp_path / "other", download=True)
    assert not (tmp_path / "other").exists()


def test_without_a_network_the_error_names_the_files_and_the_folder(tmp_path):
    with pytest.raises(DownloadError) as caught:
        packed_set("https://nowhere.invalid/").locate("Letters", tmp_path, download=True)
    message = str(caught.value)
    assert "https://nowhere.invalid/a-idx1.gz" in message and "\n" not in message
    assert f"a-idx1, b-idx1 manually, into {tmp_path / 'raw'}" in message
    assert tree(tmp_path) == {}
