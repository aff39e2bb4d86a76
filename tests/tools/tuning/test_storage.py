import contextlib
import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import Engine, event

from jax_trainer.tools.cli import main
from jax_trainer.tools.tuning import StorageError, tune
from jax_trainer.tools.tuning.storage import JOURNAL, open_storage, secrets_of, shown_storage
from tests.tools.cli.cli_runs import process_environment
from tests.tools.tuning.tuning_runs import LINE, parabola

PASSWORD = "CANARY-9f3a"


def states(folder: Path) -> list[str]:
    """How the trials of the study in a journal ended, as Optuna itself sees it."""
    backend = JournalFileBackend(str(folder / JOURNAL))
    [summary] = optuna.get_all_study_summaries(optuna.storages.JournalStorage(backend))
    study = optuna.load_study(study_name=summary.study_name, storage=optuna.storages.JournalStorage(backend))
    return [trial.state.name for trial in study.trials]


def test_a_journal_is_lines_of_plain_data(tmp_path: Path):
    tune(parabola, LINE, trials=3, folder=tmp_path, quiet=True)
    lines = (tmp_path / JOURNAL).read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    assert states(tmp_path) == ["COMPLETE"] * 3


@pytest.mark.slow
def test_reading_a_study_runs_no_code_of_it(tmp_path: Path):
    tune(parabola, LINE, trials=2, folder=tmp_path, quiet=True)
    script = f"""
import sys
import jax_trainer.tools.tuning.storage as storage
opened = storage.open_storage({str(tmp_path / JOURNAL)!r})
seen = []
unsafe = ("exec", "compile", "pickle.find_class")
sys.addaudithook(lambda event, args: seen.append(event) if event in unsafe else None)
storage.open_storage({str(tmp_path / JOURNAL)!r})
assert not seen, seen
"""
    subprocess.run([sys.executable, "-c", script], env=process_environment(), check=True, timeout=60)


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path, subtests):
    for number, cut in enumerate([1, 20]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(cut=cut):
            tune(parabola, LINE, trials=2, folder=folder, quiet=True)
            journal = folder / JOURNAL
            complete = journal.read_bytes()
            last = complete.splitlines(keepends=True)[-1]
            journal.write_bytes(complete + last[:cut])
            assert tune(parabola, LINE, trials=3, folder=folder, quiet=True).count("complete") == 3
            assert journal.read_bytes().startswith(complete)


def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path, subtests):
    for number, content in enumerate(["a note without an end", "a note\n", '{"my": "data"}\n']):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(content=content):
            (folder / "notes.txt").write_text(content)
            with pytest.raises(StorageError, match=r"notes.txt .*not a journal.*Name another"):
                open_storage(folder / "notes.txt")
            assert (folder / "notes.txt").read_text() == content


def test_a_database_keeps_a_study_as_well(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    first = tune(parabola, LINE, trials=3, storage=url, name="line", folder=tmp_path / "a", quiet=True)
    again = tune(parabola, LINE, trials=5, storage=url, name="line", folder=tmp_path / "b", quiet=True)
    assert [trial["trial"] for trial in sorted(again.trials, key=lambda trial: trial["trial"])] == [0, 1, 2, 3, 4]
    assert first.trials == [trial for trial in again.trials if trial["trial"] < 3]
    assert optuna.load_study(study_name="line", storage=url).best_params == again.params


URLS = {
    f"postgresql://me:{PASSWORD}@localhost:1/db": "postgresql://<hidden>@localhost:1/db",
    f"mysql+nodriver://me:{PASSWORD}@host/db?password={PASSWORD}": "mysql+nodriver://<hidden>@host/db?password=<hidden>",
    f"nonsense://{PASSWORD}@": "nonsense://<hidden>@",
    f"redis://:{PASSWORD}@localhost/0": "redis://<hidden>@localhost/0",
    f"sqlite:////nowhere/{PASSWORD}/../study.db?token={PASSWORD}": "sqlite:////nowhere/<hidden>/../study.db?token=<hidden>",
}


def test_a_storage_that_cannot_be_opened_is_reported_without_its_credentials(tmp_path: Path, subtests):
    for number, url in enumerate(URLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(url=url):
            with pytest.raises(StorageError) as caught:
                tune(parabola, LINE, storage=url, folder=folder, quiet=True)
            message = str(caught.value)
            assert message.startswith(f"The storage {URLS[url]}")
            assert caught.value.__cause__ is None and caught.value.__suppress_context__
            assert PASSWORD not in message or "nowhere" in url
            assert not [file for file in folder.rglob("*") if file.is_file() and PASSWORD.encode() in file.read_bytes()]


def test_a_password_is_known_as_it_is_written_and_as_it_is_meant():
    assert secrets_of("postgresql://me:a%40bcdef@host/db") == {"a%40bcdef", "a@bcdef"}
    assert secrets_of("study.journal") == secrets_of("sqlite:///x.db") == frozenset()
    assert shown_storage(Path("a/study.journal")) == "a/study.journal"


def test_optuna_says_nothing_itself_and_is_as_talkative_afterwards_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    before = optuna.logging.get_verbosity()
    with caplog.at_level(logging.DEBUG):
        tune(parabola, LINE, trials=2, folder=tmp_path, quiet=True)
    assert optuna.logging.get_verbosity() == before
    assert capsys.readouterr() == ("", "") and not caplog.records


def test_without_optuna_one_sentence_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    missing = r"optuna.*pip install 'jax-trainer\[tune\]'"
    with pytest.raises(ModuleNotFoundError, match=missing):
        tune("missing.yaml", {"a.b": [1]})
    root = Path(__file__).parents[3]
    given = [
        "tune",
        str(root / "src/jax_trainer/configs" / "digits.yaml"),
        "--space",
        str(root / "src/jax_trainer/configs" / "spaces" / "digits.yaml"),
    ]
    assert main(given) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and re.search(missing, err)


def test_no_connection_to_a_database_is_left_open(tmp_path):
    file = tmp_path / "studies.db"
    tune(parabola, LINE, trials=2, folder=tmp_path, storage=f"sqlite:///{file}", quiet=True)
    assert file.exists()
    assert file not in [Path(os.path.realpath(one)) for one in Path("/proc/self/fd").iterdir()]


def test_a_database_that_fails_ends_a_study_with_one_sentence(tmp_path):
    file = tmp_path / "studies.db"

    def broken(values, trial):
        with contextlib.closing(sqlite3.connect(file)) as database:
            database.execute("DROP TABLE trials")
        return 0.0

    with pytest.raises(StorageError, match=r"studies.db does not answer.*no such table.*run the same again") as caught:
        tune(broken, LINE, trials=2, folder=tmp_path, storage=f"sqlite:///{file}", quiet=True)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__


def test_workers_outlast_a_database_that_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr("jax_trainer.tools.tuning.storage._RETRY_SECONDS", 0.1)
    away_until = 0.0

    def execute(*statement: Any) -> None:
        if time.monotonic() < away_until:
            raise sqlite3.OperationalError("the server is restarting")

    def objective(values: dict[str, Any], trial: Any) -> float:
        nonlocal away_until
        away_until = time.monotonic() + 0.5
        return parabola(values, trial)

    event.listen(Engine, "do_execute", execute)
    try:
        found = tune(objective, LINE, trials=3, folder=tmp_path, storage=f"sqlite:///{tmp_path}/study.db", quiet=True)
    finally:
        event.remove(Engine, "do_execute", execute)
    assert [one["state"] for one in found.trials] == ["complete"] * 3
    assert sum("does not answer" in one.getMessage() for one in caplog.records) >= 1
