"""The page in a real browser: Chromium, driven over HTTP, where it is installed."""

import json
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from jax_trainer.tools.reports import report
from tests.tools.reports.report_runs import ROWS, write_run, write_times
from tests.tools.reports.test_html import EVIL

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --window-size=1280,1600"
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(DRIVER is None or BROWSER is None, reason="needs Chromium and its driver"),
]


class Browser:
    """A session of a WebDriver."""

    def __init__(self, address: str, profile: Path) -> None:
        options = {"binary": BROWSER, "args": [*FLAGS.split(), f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._address = f"{address}/session"
        made = self.ask("", {"capabilities": {"alwaysMatch": wanted}})
        self._address += f"/{made['sessionId']}"

    def ask(self, path: str, data: Any = None, method: str = "POST") -> Any:
        body = json.dumps({} if data is None else data).encode() if method == "POST" else None
        request = Request(f"{self._address}{path}", body, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, file: Path) -> None:
        self.ask("/url", {"url": file.as_uri()})
        self.wait("document.querySelectorAll('.u-over').length > 0")

    def run(self, script: str) -> Any:
        return self.ask("/execute/sync", {"script": f"return ({script})", "args": []})

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + 20
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def set(self, name: str, value: str) -> None:
        """Sets an input of the toolbar as a user would."""
        one, text = f"document.forms[0].elements[{json.dumps(name)}]", json.dumps(value)
        self.run(f"{one}.type === 'checkbox' ? {one}.checked = {text} === 'on' : {one}.value = {text}")
        self.run(f"{one}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def move(self, *actions: dict[str, Any]) -> None:
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": list(actions)}
        self.ask("/actions", {"actions": [pointer]})

    def problems(self) -> list[str]:
        return [entry["message"] for entry in self.ask("/se/log", {"type": "browser"})]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert DRIVER is not None
    log = tmp_path_factory.mktemp("driver") / "driver.log"
    with subprocess.Popen([DRIVER, f"--port={port}", f"--log-path={log}"], stdout=subprocess.DEVNULL) as driver:
        try:
            session = None
            for _ in range(100):
                try:
                    session = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("profile"))
                    break
                except URLError:  # it has not started
                    time.sleep(0.1)
            assert session is not None
            yield session
            session.ask("", method="DELETE")
        finally:
            driver.terminate()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for name in "ab":
        write_times(write_run(tmp_path / name))
    return report(tmp_path / "a", tmp_path / "b").save(tmp_path / "page.html")


def test_every_setting_redraws_the_curves_without_an_error(browser: Browser, page: Path):
    browser.open(page)
    assert browser.run("!document.forms[0].hidden")
    for name, values in {
        "x": ("epoch", "examples", "seconds", "step"),
        "smooth": ("0.9", "0"),
        "logx": ("on", "off"),
        "logy": ("on", "off"),
        "filter": ("acc", ""),
    }.items():
        for value in values:
            browser.set(name, value)
            shown = browser.run("document.querySelectorAll('figure.chart:not([hidden]) canvas').length")
            assert shown == (1 if value == "acc" else 2), (name, value)
    browser.run("[...document.querySelectorAll('details')].forEach(one => one.open = true)")
    browser.wait("document.querySelectorAll('canvas').length === document.querySelectorAll('figure.chart').length")
    assert browser.problems() == []


def test_values_under_the_cursor_zoom_and_hiding(browser: Browser, page: Path):
    browser.open(page)
    box = browser.run(
        "(one => [one.x, one.y, one.width, one.height])(document.querySelector('.u-over').getBoundingClientRect())"
    )
    left, middle = int(box[0]) + 2, int(box[1] + box[3] / 2)
    value = "document.querySelector('.legend output').textContent"
    assert browser.run(value) == "1.25"
    browser.move({"type": "pointerMove", "x": left, "y": middle})
    assert browser.run(value) == "1.75"
    width = int(box[2])
    browser.move(
        {"type": "pointerMove", "x": left + width // 2, "y": middle},
        {"type": "pointerDown", "button": 0},
        {"type": "pointerMove", "x": left + width - 10, "y": middle},
        {"type": "pointerUp", "button": 0},
    )
    browser.move({"type": "pointerMove", "x": left, "y": middle})
    step = "document.querySelector('figcaption small').textContent"
    assert float(browser.run(step).split()[1]) > 4  # the left end is no longer the first step
    browser.run("document.forms[0].elements.reset.click()")
    browser.run("document.querySelector('.legend button').click()")
    assert browser.run("document.querySelector('.legend button').className") == "off"
    assert browser.problems() == []


def test_dark_and_light_follow_the_system(browser: Browser, page: Path):
    colours = set()
    for scheme in ("dark", "light"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.ask("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}})
        browser.open(page)
        colours.add(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2 and browser.problems() == []


def test_hostile_names_do_nothing_and_nothing_is_fetched(browser: Browser, tmp_path: Path):
    evil = EVIL.replace("alert(1)", "window.pwned = 1").replace("alert(2)", "window.pwned = 2")
    rows = [*ROWS, *({"step": step, f"val/{evil}": step, evil: step, "text": None} for step in (1, 2))]
    rows += [{"step": 3, "text": {evil: evil}}, {"step": 3, "media": {evil: "media/samples_8.png"}}]
    folder = write_run(tmp_path / evil.replace("/", ""), rows, f"{json.dumps(evil)}: {json.dumps(evil)}\n")
    browser.open(report(folder).save(tmp_path / "page.html"))
    browser.run("[...document.querySelectorAll('details')].forEach(one => one.open = true)")
    browser.wait("document.querySelectorAll('canvas').length === document.querySelectorAll('figure.chart').length")
    assert browser.run("window.pwned === undefined && performance.getEntriesByType('resource').length") == 0
    assert "<script>" in browser.run("document.querySelector('h1').textContent")
    assert browser.problems() == []


def test_a_script_takes_a_picture_for_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["picture_report.py", str(tmp_path / "a.png"), str(tmp_path / "a"), "--dark"])
    runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "picture_report.py"))["main"]()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
