import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_tools import FaultyConfig, FaultyTool, threads_of_tools, wait_until

from jax_trainer.logger.background import FAILURES_IN_A_ROW, MOST_BYTES, BackgroundWriter, DroppedRecords


def begun(
    config: FaultyConfig | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    most: int = 5,
    patience: float = 0.0,
) -> BackgroundWriter:
    losses = DroppedRecords("FaultyTool", "so be it")
    make = lambda: FaultyTool(config or FaultyConfig(), Path())
    return BackgroundWriter(losses, make, check=check, most_entries=most, patience=patience)


def give(tool: BackgroundWriter, *steps: int, size: int = 0) -> None:
    for step in steps:
        tool.submit(lambda tool, step=step: tool.write(step, {"x": step}), size)


def ended(tool: BackgroundWriter, seconds: float = 5.0) -> FaultyTool:
    tool.finish("completed")
    tool.join(time.monotonic() + seconds)
    return FaultyTool.latest


def flushed(tool: BackgroundWriter, seconds: float = 5.0) -> bool:
    return tool.flush(time.monotonic() + seconds)


def steps(tool: FaultyTool) -> list[int]:
    return [step for step, _ in tool.rows()]


def test_entries_arrive_in_order_in_a_thread_of_their_own():
    tool = begun(most=1000)
    give(tool, *range(500))
    end = ended(tool)
    assert (steps(end), end.closed, tool.dropped.count) == (list(range(500)), ["completed"], 0)
    assert threading.get_ident() not in end.threads and len(end.threads) == 1
    assert not threads_of_tools()


def test_entries_are_written_together_so_that_the_tool_rarely_takes_time_from_training(monkeypatch):
    monkeypatch.setattr("jax_trainer.logger.background.LINGER_SECONDS", 30.0)
    tool = begun(most=1000)
    tool.start()
    wait_until(lambda: tool._has_nothing_to_do)
    give(tool, 1, 2, 3)
    time.sleep(0.3)
    assert tool._done == 0
    asked = time.monotonic()
    assert flushed(tool) and time.monotonic() - asked < 5  # who waits is served now
    give(tool, 4)
    assert steps(ended(tool)) == [1, 2, 3, 4]  # and the end of a run does not wait either


def test_entries_are_on_their_way_after_a_moment_without_being_asked_for():
    tool = begun()
    give(tool, 1)
    wait_until(lambda: tool._done == 1)
    ended(tool)


def test_a_queue_that_fills_up_is_written_now(monkeypatch):
    monkeypatch.setattr("jax_trainer.logger.background.LINGER_SECONDS", 30.0)
    tool = begun(most=10)
    tool.start()
    wait_until(lambda: tool._has_nothing_to_do)
    give(tool, *range(6))
    wait_until(lambda: tool._done == 6)
    ended(tool)


def test_what_comes_after_the_end_is_ignored():
    tool = begun()
    give(tool, 1)
    end = ended(tool)
    give(tool, 2)
    assert (steps(end), tool.dropped.count) == ([1], 0)


def test_a_tool_that_is_given_nothing_is_never_made(monkeypatch):
    monkeypatch.setattr(FaultyTool, "latest", None)
    tool = begun()
    tool.finish("failed")
    tool.join(0.0)
    assert (FaultyTool.latest, tool.dropped.count) == (None, 0)


def test_flushing_returns_whether_all_is_written():
    tool = begun()
    give(tool, 1, 2)
    assert flushed(tool)
    assert steps(FaultyTool.latest) == [1, 2]
    ended(tool)
    assert flushed(tool)


@pytest.mark.parametrize(("config", "count"), [(FaultyConfig("write"), 2), (FaultyConfig("init"), 3)])
def test_flushing_reports_dropped_entries(config, count):
    tool = begun(config)
    give(tool, 1, 2)
    assert not flushed(tool)
    ended(tool)
    assert tool.dropped.count == count


def test_a_full_queue_drops_the_newest_and_never_waits(caplog):
    tool = begun(FaultyConfig(blocks_in="write"))
    give(tool, 0)
    wait_until(lambda: FaultyTool.latest is not None and bool(FaultyTool.latest.threads))  # it holds the first one
    began = time.perf_counter()
    give(tool, *range(1, 101))
    assert time.perf_counter() - began < 1
    assert tool.dropped.count == 95
    FaultyTool.gate.set()
    assert steps(ended(tool)) == [0, 1, 2, 3, 4, 5]
    [warning] = [record.message for record in caplog.records]
    assert warning.startswith("FaultyTool is slow or blocks") and "5 entries" in warning
    assert warning.endswith("; so be it.")


def test_large_entries_fill_the_queue_by_their_size():
    tool = begun(FaultyConfig(blocks_in="init"))
    give(tool, 1, size=2 * MOST_BYTES)  # alone it is taken, however large
    give(tool, 2, size=1)
    give(tool, 3)
    FaultyTool.gate.set()
    assert flushed(tool) is False
    give(tool, 4, size=MOST_BYTES)
    assert steps(ended(tool)) == [1, 4]
    assert tool.dropped.count == 2


def test_flushing_a_tool_that_blocks_takes_its_time_once():
    tool = begun(FaultyConfig(blocks_in="write"))
    give(tool, 1)
    assert not flushed(tool, 0.05)
    began = time.perf_counter()
    for _ in range(10):
        assert not flushed(tool, 30)
    assert time.perf_counter() - began < 5
    FaultyTool.gate.set()
    wait_until(lambda: flushed(tool))
    ended(tool)


def test_with_patience_a_burst_of_entries_is_not_lost():
    tool = begun(most=5, patience=30)
    give(tool, *range(500))
    assert (steps(ended(tool)), tool.dropped.count) == (list(range(500)), 0)


def test_patience_with_a_tool_that_blocks_is_had_once():
    tool = begun(FaultyConfig(blocks_in="init"), most=5, patience=0.3)
    began = time.perf_counter()
    give(tool, *range(100))
    assert 0.3 <= time.perf_counter() - began < 3
    assert tool.dropped.count == 95
    FaultyTool.gate.set()
    wait_until(lambda: not tool._queue)
    give(tool, *range(100, 200))  # it goes on, and so does patience
    ended(tool)
    assert tool.dropped.count == 95


@pytest.mark.parametrize("place", ["init", "write", "close"])
def test_a_tool_that_blocks_is_left_behind_and_ends_when_it_can(place, caplog):
    tool = begun(FaultyConfig(blocks_in=place, raises_in=place))
    give(tool, 1, 2, 3)
    began = time.perf_counter()
    ended(tool, 0.05)
    assert time.perf_counter() - began < 2
    count = {"init": 3, "write": 3, "close": 1}[place]
    assert (tool.dropped.count, len(threads_of_tools())) == (count, 1)
    FaultyTool.gate.set()
    wait_until(lambda: not threads_of_tools())
    [warning] = [record.message for record in caplog.records]  # and none about what it raises afterwards
    assert warning.startswith("FaultyTool blocks, and the run no longer waits for it.")
    assert tool.dropped.count == count


def test_a_tool_that_keeps_failing_is_given_up_on_and_closed(caplog):
    tool = begun(FaultyConfig("write"), most=1000)
    give(tool, *range(FAILURES_IN_A_ROW))
    wait_until(lambda: not threads_of_tools())
    assert FaultyTool.latest.closed == ["failed"]
    give(tool, 1, 2)
    ended(tool)
    assert tool.dropped.count == FAILURES_IN_A_ROW + 2
    assert len(caplog.records) == 1


def test_failing_now_and_then_is_no_reason_to_give_up():
    tool = begun(FaultyConfig("write", at=3), most=1000)
    give(tool, *range(1, 8))
    assert (steps(ended(tool)), tool.dropped.count) == ([1, 2, 4, 5, 6, 7], 1)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), ValueError("one\n  two " * 100)])
def test_whatever_a_tool_raises_it_continues(error, caplog):
    tool = begun()

    def fail(_):
        raise error

    tool.submit(fail)
    give(tool, 1)
    assert (steps(ended(tool)), tool.dropped.count) == ([1], 1)
    [record] = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "jax_trainer")
    assert f"failed: {type(error).__name__}: " in record.message and "\n" not in record.message
    assert len(record.message) < 400


def test_what_is_missing_is_reported_at_once_and_no_thread_starts(caplog):
    def check():
        raise ModuleNotFoundError("there is no such thing")

    tool = begun(check=check)
    assert not threads_of_tools()
    assert [record.message for record in caplog.records] == [
        "FaultyTool failed: ModuleNotFoundError: there is no such thing. Training continues; so be it."
    ]
    give(tool, 1, 2)
    assert not flushed(tool)
    tool.finish("completed")
    tool.join(time.monotonic())
    assert tool.dropped.count == 3


def asked(tool: BackgroundWriter) -> Callable[[float], int | None]:
    return tool.ask(lambda tool: len(tool.given))


def test_a_question_is_answered_when_all_before_it_is_written_and_nothing_after():
    tool = begun(FaultyConfig(blocks_in="write"))
    give(tool, 1, 2)
    answer = asked(tool)
    give(tool, 3)
    assert answer(0.01) is None
    FaultyTool.gate.set()
    assert answer(5.0) == answer(0.0) == 2
    assert steps(ended(tool)) == [1, 2, 3]
    assert answer(0.0) == 2
    assert tool.dropped.count == 0


def test_a_question_finds_space_in_a_full_queue():
    tool = begun(FaultyConfig(blocks_in="write"))
    give(tool, *range(9))
    answer = asked(tool)
    FaultyTool.gate.set()
    assert answer(5.0) == len(steps(ended(tool)))
    assert tool.dropped.count


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_disabled_tool_answers_nothing_and_is_not_waited_for(when):
    tool, began = begun(FaultyConfig("write", "init"), most=50), time.monotonic()
    give(tool, *range(FAILURES_IN_A_ROW))
    answer = asked(tool) if when == "before" else None
    FaultyTool.gate.set()
    if answer is None:
        wait_until(lambda: not threads_of_tools())
        answer = asked(tool)
    assert answer(60.0) is None
    assert time.monotonic() - began < 30
    ended(tool)


def test_a_question_that_cannot_be_answered_costs_a_warning_and_has_no_answer(caplog):
    tool = begun()
    assert tool.ask(lambda tool: 1 // 0)(5.0) is None
    give(tool, 1)
    assert steps(ended(tool)) == [1]
    assert "ZeroDivisionError" in caplog.text


def test_after_the_end_nothing_is_asked():
    tool = begun()
    ended(tool)
    assert asked(tool)(5.0) is None
