"""`runs` and `diff`: run folders listed and compared, without JAX."""

import csv
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from jax_trainer.tools.cli.commands import runs
from tests.tools.cli.cli_runs import PROGRAM, run_command
from tests.tools.reports.record_folders import make_run, start_of

EVIL = "\x1b[31mred\x1b[0m [bold]x[/bold] :smile:"
NO_JAX = """
import json, sys
from jax_trainer.tools.cli import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print(json.dumps({"codes": codes, "jax": "jax" in sys.modules, "numpy": "numpy" in sys.modules}))
"""


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_a_run_is_listed_with_its_status_and_metrics(trained: Path, tmp_path: Path, wide):
    runs = tmp_path / "runs" / "MLP"
    shutil.copytree(trained, runs / "one")
    result = run_command("runs", folder=tmp_path)
    above, below, row = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert above.split() == ["best", "last"]
    assert below.split() == ["run", "status", "age", "duration", "epoch", "step", "val/acc", "val/acc"]
    assert row.split()[:2] == ["MLP/one", "completed"] and row.split()[-4:-2] == ["2", "8"]
    [data] = run_command("runs", "--json", folder=tmp_path).data["runs"]
    assert (data["run"], data["status"], data["epoch"], data["step"]) == ("MLP/one", "completed", 2, 8)
    assert 0 < data["last:val/acc"] <= data["val/acc"] <= 1 and data["duration"] > 0


def test_numbers_and_names_of_runs_are_shown_whole_or_their_column_is_named_below(tmp_path: Path, subtests):
    for number, width in enumerate([80, 60, None]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(width=width):
            names = ["sweep/lr=0.001/seed=1/20261117-103821", "sweep/lr=0.002/seed=1/20261117-103821"]
            for name in names:
                row = {"step": 123_456_789, "epoch": 1226, "val/loss": 0.0123456789, "val/acc": 0.987654}
                make_run(folder / "runs" / name, rows=[row])
            out = run_in_terminal("runs", "runs", "--columns=+val/acc", folder=folder, width=width)
            table, _, hidden = out.partition("Not shown")
            assert (width is None) is (not hidden) and all(len(line) <= (width or 200) for line in table.splitlines())
            numbers = {"step": "123456789", "epoch": "1226", "val/acc": "0.987654", "val/loss": "0.0123457"}
            for column, value in numbers.items():
                assert table.split().count(value) in (2, 4) or column in hidden, column
            assert "step" not in hidden and "best val/loss" not in hidden.replace("\n", " ")
            firsts = "".join(line.split()[0] for line in table.splitlines() if not line.startswith(" "))
            assert all(name in firsts for name in names)


def run_in_terminal(*words: str, folder: Path, width: int | None) -> str:
    """The output of a command on a pseudo-terminal of this width; None: through a pipe."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width or 40, 0, 0))
    options = {"cwd": folder, "env": {**environment, "TERM": "xterm"}, "stdin": terminal, "stderr": terminal}
    with os.fdopen(main, "rb", buffering=0) as screen, os.fdopen(terminal, "rb", buffering=0):
        done = subprocess.run(
            [*PROGRAM, *words], check=True, stdout=subprocess.PIPE if width is None else terminal, **options
        )
        out = screen.read(1 << 16) if width is not None else done.stdout
    return re.sub(r"\r|\x1b\[[0-9;]*m", "", out.decode())


def test_the_usual_table_fits_into_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [{"step": 12000, "epoch": 100, "val/loss": 0.0123456789}]
    make_run(tmp_path / "runs/linear/20261117-103821", rows=rows)
    _, _, row = run_command("runs", folder=tmp_path).out.splitlines()
    assert row.split()[0] == "linear/20261117-103821" and row.split()[-2:] == ["0.0123457", "0.0123457"]


def test_runs_are_selected_sorted_and_written_as_csv(tmp_path: Path):
    for name, loss in (("a", 0.5), ("b", 0.25), ("c", 0.75)):
        config = {"optimizer.lr": loss, "model.class_name": "MLP" if name == "c" else "CNN"}
        make_run(tmp_path / "mine" / name, config=config, rows=[{"step": 1, "val/loss": loss}])
    chosen = ["mine", "--where", "model.class_name=CNN", "--sort", "val/loss"]
    result = run_command("runs", *chosen, "--csv", "--columns", "run,optimizer.lr,val/loss", folder=tmp_path)
    assert list(csv.reader(io.StringIO(result.out))) == [
        ["run", "optimizer.lr", "val/loss"],
        ["b", "0.25", "0.25"],
        ["a", "0.5", "0.5"],
    ]
    data = run_command("runs", *chosen, "--json", "--columns=+optimizer.lr", folder=tmp_path).data
    assert data["columns"][:2] == ["run", "status"] and data["columns"][-1] == "optimizer.lr"
    assert [run["run"] for run in data["runs"]] == ["b", "a"]


@pytest.mark.parametrize("option", [[], ["--csv"], ["--json"]], ids=["table", "csv", "json"])
@pytest.mark.parametrize("count", [1, pytest.param(300, marks=pytest.mark.slow)])
def test_hostile_names_and_values_are_shown_harmless(option, count: int, tmp_path: Path, wide):
    folder = tmp_path / "runs" / EVIL.replace("/", "|")
    for number in range(count):
        rows = [{"step": 1, EVIL: 1.0}]
        make_run(folder / f"{number}", rows=rows, config={"note": f"{EVIL}\nb"}, starts=[start_of(EVIL)], host=EVIL)
    result = run_command("runs", "--columns", f"run,status,note,host,{EVIL}", *option, folder=tmp_path)
    assert (result.code, result.err) == (0, "") and "\x1b" not in result.out
    assert "[bold]x[" in result.out and ":smile:" in result.out
    if option == []:
        assert result.out.count("\n") <= count + 2


def test_a_folder_that_is_not_there_and_unknown_columns_are_one_line(tmp_path: Path):
    make_run(tmp_path / "runs/1")
    (tmp_path / "empty").mkdir()
    for words, expected in (
        (["nowhere"], "nowhere"),
        (["--sort", "val/los"], "`val/loss`"),
        (["--columns", "run,val/los"], "`val/loss`"),
        (["--where", "x"], "'x'"),
        (["--csv", "--json"], "--csv"),
        (["--watch", "0"], "'0'"),
        (["runs", "more"], "unexpected"),
    ):
        result = run_command("runs", *words, folder=tmp_path)
        assert result.code == 2 and result.err.count("\n") == 1 and expected in result.err, words
    result = run_command("runs", "empty", folder=tmp_path)
    assert (result.code, result.err) == (0, "") and "empty" in result.out
    assert not list((tmp_path / "empty").iterdir())


def test_the_duration_is_the_time_that_the_command_time_shows(run: Path, tmp_path: Path, subtests):
    for number, end in enumerate(["completed", "killed"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(end=end):
            if end == "killed":
                record = json.loads((run / "run.json").read_text())
                record["starts"][-1] |= {"end": None, "status": "running"}
                (run / "run.json").write_text(json.dumps(record))
                rows = (run / "time.jsonl").read_text().replace('"completed"', '"running"')
                (run / "time.jsonl").write_text(f'{rows}{{"start": 1, "since": "proc')  # killed in the middle of a row
            [listed] = run_command("runs", run, "--json", folder=folder).data["runs"]
            assert listed["status"] == end
            assert listed["duration"] == pytest.approx(run_command("time", run, "--json", folder=folder).data["wall"])


def test_watching_shows_the_table_again_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide):
    make_run(tmp_path / "runs/1")
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        make_run(tmp_path / f"runs/{len(pauses) + 1}")
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.time, "sleep", pause)
    result = run_command("runs", "--watch", "0.5", folder=tmp_path)
    assert (result.code, result.err, pauses) == (0, "", [0.5, 0.5])
    assert "completed" in result.out


def test_equal_runs_have_the_exit_code_0(trained: Path, tmp_path: Path):
    copy = shutil.copytree(trained, tmp_path / "copy")
    result = run_command("diff", trained, copy, "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert result.data["equal"] and result.data["config"] == {} and result.data["metrics"]["first_row"] is None
    shown = run_command("diff", trained, copy, folder=tmp_path)
    assert shown.code == 0 and "configuration, computation, metrics" in shown.out


def test_a_configuration_that_is_damaged_is_not_called_equal(run: Path, trained: Path, tmp_path: Path):
    (run / "config.yaml").write_text("trainer: {seed: [")
    result = run_command("diff", trained, run, folder=tmp_path)
    assert (result.code, result.err) == (1, "") and "Equal: computation, metrics." in result.out
    assert "config.yaml" in result.out.replace("\n", "")
    assert run_command("diff", trained, run, "--json", folder=tmp_path).data["unread"].keys() == {"configuration"}


def test_runs_that_differ_have_the_exit_code_1_and_no_error(tmp_path: Path, wide):
    a = make_run(tmp_path / "a", config={"lr": 0.1}, packages={"jax": "0.10.1"})
    rows = [{"step": 10, "epoch": 1, "val/loss": 0.25}]
    b = make_run(tmp_path / "b", config={"lr": 0.2}, packages={"jax": "0.10.2"}, rows=rows)
    result = run_command("diff", a, b, folder=tmp_path)
    assert (result.code, result.err) == (1, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert ["lr", "0.1", "0.2"] in lines and ["jax", "0.10.1", "0.10.2"] in lines
    assert ["val/loss", "0.5", "0.25"] in lines and ["val/loss", "0.75", "0.25", "-0.5"] in lines
    data = run_command("diff", a, b, "--json", folder=tmp_path).data
    assert data["metrics"]["first_row"]["row"] == 1 and data["packages"]["jax"] == {"a": "0.10.1", "b": "0.10.2"}


def test_a_diff_with_something_else_has_the_exit_code_2(tmp_path: Path):
    run = make_run(tmp_path / "a")
    result = run_command("diff", run, tmp_path / "missing", folder=tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1) and "missing" in result.err


def test_hostile_values_of_a_diff_are_shown_harmless(tmp_path: Path, wide):
    runs = [make_run(tmp_path / n, config={EVIL: f"{EVIL}\n{n}"}, rows=[{"step": 1, EVIL: n}]) for n in "ab"]
    result = run_command("diff", *runs, folder=tmp_path)
    assert result.code == 1 and "\x1b" not in result.out and "[bold]x[/bold] :smile:" in result.out


def test_runs_and_diff_import_no_jax(tmp_path: Path):
    for name in "ab":
        make_run(tmp_path / "runs" / name)
    words = [["runs"], ["diff", "runs/a", "runs/b"], ["runs", "nowhere"]]
    command = [sys.executable, "-c", NO_JAX, json.dumps(words)]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"codes": [0, 0, 2], "jax": False, "numpy": False}
