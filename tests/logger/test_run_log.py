import logging

import pytest

from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.logger.run_log import RunLog
from tests.rows import noted_row

LOG = logging.getLogger("jax_trainer")


def kept(path) -> list[str]:
    return [line.split()[-1] for line in path.read_text().splitlines()]


def test_runs_that_overlap_keep_their_own_messages_to_the_end(tmp_path):
    level = LOG.level
    first, second = RunLog(tmp_path / "first.log", "info"), RunLog(tmp_path / "second.log", "debug")
    LOG.info("one")
    first.close()
    LOG.debug("two")
    second.close()
    LOG.error("three")
    assert (kept(tmp_path / "first.log"), kept(tmp_path / "second.log")) == (["one"], ["one", "two"])
    assert (LOG.level, LOG.handlers) == (level, [])


def test_a_run_without_messages_leaves_no_file(tmp_path):
    RunLog(tmp_path / "run.log", "info").close()
    assert not list(tmp_path.iterdir())


def test_warnings_still_reach_the_screen_once(tmp_path, monkeypatch, capsys):
    for has_own_handler in [False, True]:
        with noted_row(has_own_handler):
            own = [logging.StreamHandler()] if has_own_handler else []
            monkeypatch.setattr(logging.getLogger(), "handlers", own)
            first, second = RunLog(tmp_path / "first.log", "info"), RunLog(tmp_path / "second.log", "info")
            first.close()
            LOG.warning("careful")
            second.close()
            LOG.warning("again")
            assert capsys.readouterr().err.split() == ["careful", "again"]
            assert LOG.handlers == []


def test_other_handlers_get_no_more_than_without_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    log = RunLog(tmp_path / "run.log", "debug")
    LOG.info("for the file")
    LOG.warning("for all")
    log.close()
    assert capsys.readouterr().err.split("\n") == ["for all", ""]
    assert kept(tmp_path / "run.log") == ["file", "all"]


def test_a_file_that_cannot_be_written_costs_one_warning(tmp_path_factory: pytest.TempPathFactory, caplog, capsys):
    for how in ["gone", "full"]:
        with noted_row(how):
            tmp_path = tmp_path_factory.mktemp("row")
            caplog.clear()
            if how == "full":
                (tmp_path / "run.log").symlink_to("/dev/full")
            log = RunLog(tmp_path / "run.log" if how == "full" else tmp_path / "gone" / "run.log", "info")
            for word in ("one", "two"):
                LOG.warning(word)
            log.close()
            said = [record.message for record in caplog.records]
            assert sorted(said)[1:] == ["one", "two"] and "run.log cannot be written" in sorted(said)[0]
            assert "Traceback" not in capsys.readouterr().err


def test_the_last_line_counts_no_rows_because_a_rollback_removes_some(tmp_path):
    logger = Logger(LoggerConfig(), tmp_path)
    logger.write(1, {"loss": 1.0})
    mark = logger.mark()()
    logger.write(2, {"loss": 1.0})
    logger.cut(mark)
    logger.close("completed")
    last = (tmp_path / "run.log").read_text().splitlines()[-1]
    assert "Run completed" in last and str(tmp_path / "metrics.jsonl") in last
    assert "rows" not in last
