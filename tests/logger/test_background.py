import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jax_trainer.logger.writers import FAILURES_IN_A_ROW, MOST_BYTES, BackgroundWriter, DroppedRecords
from tests.logger.faulty_tools import FaultyConfig, FaultyTool, threads_of_tools, wait_until
from tests.rows import noted_row


def start_writer(
    config: FaultyConfig | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    most: int = 5,
    patience: float = 0.0,
) -> BackgroundWriter:
    dropped = DroppedRecords("FaultyTool", "entries are lost")
    make = lambda: FaultyTool(config or FaultyConfig(), Path())
    return BackgroundWriter(dropped, make, check=check, most_entries=most, patience=patience)


def submit(tool: BackgroundWriter, *steps: int, size: int = 0) -> None:
    for step in steps:
        tool.submit(lambda tool, step=step: tool.write(step, {"x": step}), size)


def finish(tool: BackgroundWriter, seconds: float = 5.0) -> FaultyTool:
    tool.finish("completed")
    tool.join(time.monotonic() + seconds)
    return FaultyTool.latest


def flush(tool: BackgroundWriter, seconds: float = 5.0) -> bool:
    return tool.flush(time.monotonic() + seconds)


def steps(tool: FaultyTool) -> list[int]:
    return [step for step, _ in tool.rows()]


def test_entries_arrive_in_order_in_a_separate_thread():
    tool = start_writer(most=1000)
    submit(tool, *range(500))
    end = finish(tool)
    assert (steps(end), end.closed, tool.dropped.count) == (list(range(500)), ["completed"], 0)
    assert threading.get_ident() not in end.threads and len(end.threads) == 1
    assert not threads_of_tools()


def test_entries_are_written_in_groups_so_that_the_tool_rarely_interrupts_training(monkeypatch):
    monkeypatch.setattr("jax_trainer.logger.writers.LINGER_SECONDS", 30.0)
    tool = start_writer(most=1000)
    tool.start()
    wait_until(lambda: tool._is_idle)
    submit(tool, 1, 2, 3)
    time.sleep(0.3)
    assert tool._done == 0
    asked = time.monotonic()
    assert flush(tool) and time.monotonic() - asked < 5  # a caller that waits is served at once
    submit(tool, 4)
    assert steps(finish(tool)) == [1, 2, 3, 4]  # the end of a run does not wait either


def test_entries_are_written_after_a_moment_without_a_flush():
    tool = start_writer()
    submit(tool, 1)
    wait_until(lambda: tool._done == 1)
    assert steps(FaultyTool.latest) == [1]  # before the end of the run
    finish(tool)


def test_a_queue_that_is_half_full_is_written_at_once(monkeypatch):
    monkeypatch.setattr("jax_trainer.logger.writers.LINGER_SECONDS", 30.0)
    tool = start_writer(most=10)
    tool.start()
    wait_until(lambda: tool._is_idle)
    submit(tool, *range(6))
    wait_until(lambda: tool._done == 6)
    assert steps(FaultyTool.latest) == list(range(6))  # long before it would have waited for more
    finish(tool)


def test_entries_after_the_end_are_ignored():
    tool = start_writer()
    submit(tool, 1)
    end = finish(tool)
    submit(tool, 2)
    assert (steps(end), tool.dropped.count) == ([1], 0)


def test_a_tool_without_entries_is_never_created(monkeypatch):
    monkeypatch.setattr(FaultyTool, "latest", None)
    tool = start_writer()
    tool.finish("failed")
    tool.join(0.0)
    assert (FaultyTool.latest, tool.dropped.count) == (None, 0)


def test_flush_returns_whether_everything_is_written():
    tool = start_writer()
    submit(tool, 1, 2)
    assert flush(tool)
    assert steps(FaultyTool.latest) == [1, 2]
    finish(tool)
    assert flush(tool)


def test_flush_reports_dropped_entries():
    for config, count in [(FaultyConfig("write"), 2), (FaultyConfig("init"), 3)]:
        with noted_row(config, count):
            tool = start_writer(config)
            submit(tool, 1, 2)
            assert not flush(tool)
            finish(tool)
            assert tool.dropped.count == count


def test_a_full_queue_drops_the_newest_and_never_waits(caplog):
    tool = start_writer(FaultyConfig(blocks_in="write"))
    submit(tool, 0)
    wait_until(lambda: FaultyTool.latest is not None and bool(FaultyTool.latest.threads))  # it is writing the first one
    started = time.perf_counter()
    submit(tool, *range(1, 101))
    assert time.perf_counter() - started < 1
    assert tool.dropped.count == 95
    FaultyTool.gate.set()
    assert steps(finish(tool)) == [0, 1, 2, 3, 4, 5]
    [warning] = [record.message for record in caplog.records]
    assert warning.startswith("FaultyTool ") and "5 entries" in warning


def test_large_entries_fill_the_queue_by_their_size():
    tool = start_writer(FaultyConfig(blocks_in="init"))
    submit(tool, 1, size=2 * MOST_BYTES)  # an empty queue accepts any size
    submit(tool, 2, size=1)
    submit(tool, 3)
    FaultyTool.gate.set()
    assert flush(tool) is False
    submit(tool, 4, size=MOST_BYTES)
    assert steps(finish(tool)) == [1, 4]
    assert tool.dropped.count == 2


def test_flushing_a_blocked_tool_waits_only_once():
    tool = start_writer(FaultyConfig(blocks_in="write"))
    submit(tool, 1)
    assert not flush(tool, 0.05)
    started = time.perf_counter()
    for _ in range(10):
        assert not flush(tool, 30)
    assert time.perf_counter() - started < 5
    FaultyTool.gate.set()
    wait_until(lambda: flush(tool))
    finish(tool)


def test_with_patience_a_burst_of_entries_is_not_lost():
    tool = start_writer(most=5, patience=30)
    submit(tool, *range(500))
    assert (steps(finish(tool)), tool.dropped.count) == (list(range(500)), 0)


def test_the_patience_with_a_blocked_tool_is_spent_only_once():
    tool = start_writer(FaultyConfig(blocks_in="init"), most=5, patience=0.3)
    started = time.perf_counter()
    submit(tool, *range(100))
    assert 0.3 <= time.perf_counter() - started < 3
    assert tool.dropped.count == 95
    FaultyTool.gate.set()
    wait_until(lambda: not tool._queue)
    submit(tool, *range(100, 200))  # the tool works again, and the patience is restored
    finish(tool)
    assert tool.dropped.count == 95


@pytest.mark.parametrize("place", ["init", "write", "close"])
def test_a_blocked_tool_is_abandoned_and_ends_when_it_is_unblocked(place, caplog):
    tool = start_writer(FaultyConfig(blocks_in=place, raises_in=place))
    submit(tool, 1, 2, 3)
    started = time.perf_counter()
    finish(tool, 0.05)
    assert time.perf_counter() - started < 2
    count = {"init": 3, "write": 3, "close": 1}[place]
    assert (tool.dropped.count, len(threads_of_tools())) == (count, 1)
    FaultyTool.gate.set()
    wait_until(lambda: not threads_of_tools())
    [warning] = [record.message for record in caplog.records]  # none about later errors
    assert warning.startswith("FaultyTool blocks")
    assert tool.dropped.count == count


def test_a_tool_that_fails_repeatedly_is_disabled_and_closed(caplog):
    tool = start_writer(FaultyConfig("write"), most=1000)
    submit(tool, *range(FAILURES_IN_A_ROW))
    wait_until(lambda: not threads_of_tools())
    assert FaultyTool.latest.closed == ["failed"]
    submit(tool, 1, 2)
    finish(tool)
    assert tool.dropped.count == FAILURES_IN_A_ROW + 2
    assert len(caplog.records) == 1


def test_occasional_failures_do_not_disable_a_tool():
    tool = start_writer(FaultyConfig("write", at=3), most=1000)
    submit(tool, *range(1, 8))
    assert (steps(finish(tool)), tool.dropped.count) == ([1, 2, 4, 5, 6, 7], 1)


def test_a_tool_continues_after_any_exception(caplog):
    for error in [SystemExit(3), KeyboardInterrupt(), MemoryError(), ValueError("one\n  two " * 100)]:
        with noted_row(error):
            caplog.clear()
            tool = start_writer()

            def fail(_, error=error):
                raise error

            tool.submit(fail)
            submit(tool, 1)
            assert (steps(finish(tool)), tool.dropped.count) == ([1], 1)
            [record] = caplog.records
            assert (record.levelno, record.name) == (logging.WARNING, "jax_trainer")
            assert f"failed: {type(error).__name__}: " in record.message and "\n" not in record.message
            assert len(record.message) < 400


def test_a_missing_package_is_reported_at_once_and_no_thread_starts(caplog):
    def check():
        raise ModuleNotFoundError("no such package")

    tool = start_writer(check=check)
    assert not threads_of_tools()
    [said] = [record.message for record in caplog.records]
    assert "FaultyTool failed: ModuleNotFoundError: no such package" in said
    submit(tool, 1, 2)
    assert not flush(tool)
    tool.finish("completed")
    tool.join(time.monotonic())
    assert tool.dropped.count == 3


def ask_count(tool: BackgroundWriter) -> Callable[[float], int | None]:
    return tool.ask(lambda tool: len(tool.entries))


def test_ask_runs_after_all_earlier_entries_and_before_later_ones():
    tool = start_writer(FaultyConfig(blocks_in="write"))
    submit(tool, 1, 2)
    answer = ask_count(tool)
    submit(tool, 3)
    assert answer(0.01) is None
    FaultyTool.gate.set()
    assert answer(5.0) == answer(0.0) == 2
    assert steps(finish(tool)) == [1, 2, 3]
    assert answer(0.0) == 2
    assert tool.dropped.count == 0


def test_ask_works_with_a_full_queue():
    tool = start_writer(FaultyConfig(blocks_in="write"))
    submit(tool, *range(9))
    answer = ask_count(tool)
    FaultyTool.gate.set()
    assert answer(5.0) == len(steps(finish(tool)))
    assert tool.dropped.count


@pytest.mark.parametrize("when", ["before", "after"])
def test_ask_of_a_disabled_tool_returns_none_without_waiting(when):
    tool, started = start_writer(FaultyConfig("write", "init"), most=50), time.monotonic()
    submit(tool, *range(FAILURES_IN_A_ROW))
    answer = ask_count(tool) if when == "before" else None
    FaultyTool.gate.set()
    if answer is None:
        wait_until(lambda: not threads_of_tools())
        answer = ask_count(tool)
    assert answer(60.0) is None
    assert time.monotonic() - started < 30
    finish(tool)


def test_an_exception_in_ask_costs_a_warning_and_returns_none(caplog):
    tool = start_writer()
    assert tool.ask(lambda tool: 1 // 0)(5.0) is None
    submit(tool, 1)
    assert steps(finish(tool)) == [1]
    assert "ZeroDivisionError" in caplog.text


def test_ask_after_the_end_returns_none():
    tool = start_writer()
    finish(tool)
    assert ask_count(tool)(5.0) is None
