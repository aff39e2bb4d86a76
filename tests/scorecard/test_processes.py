"""Cases of several processes that train together: one that is killed, preempted, slow, or hangs."""

import json
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import pairs
import pytest
from crashes import committed
from harness import Score, differences, ledger, ledger_differences, lines, progress, result, run, saves
from job import Options
from together import HEARTBEAT, Together, done_together, of_process

KILLS = 10
SHORT = Options(out="", steps=60, val_every=25, val_epochs=0, test=1)
EVALUATION = Path(__file__).with_name("evaluation_job.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """The job in two processes, never disturbed."""
    options = replace(SHORT, out=str(tmp_path_factory.mktemp("together") / "undisturbed"))
    done_together(options)
    return options


def killed(options: Options, victim: int, step: int) -> tuple[list[str], float]:
    """Kills one process at a step; what is wrong with how the other one ends, and how long that takes."""
    job = Together(options, trouble={victim: f"kill:{step}"})
    seconds = job.seconds_after(victim)
    ended = job.wait()
    other = ended[1 - victim]
    problems = [] if ended[victim].code == -signal.SIGKILL else [f"the victim ended with {ended[victim].code}"]
    problems += [] if other.code != 0 else ["the other one ended as if all were well"]
    problems += [f"it took {seconds:.1f} s"] if seconds > HEARTBEAT + 5 else []
    # a process whose lead dies is ended by JAX at once, in its own words
    names = r"Process 1 of 2 \(.*, pid \d+\)" if victim else "leader|Process 0"
    problems += [] if re.search(names, other.text) else [f"nobody is named: {other.text[-1500:]}"]
    return problems, seconds


@pytest.mark.slow
def test_d7_a_process_is_killed_and_the_job_continues_bit_for_bit(tmp_path, undisturbed):
    options = replace(SHORT, out=str(tmp_path / "disturbed"))
    with Score("D7") as score:
        problems, seconds = killed(options, 1, 33)
        done_together(options)
        score.add(problems + differences(options, undisturbed), "killed at 33")
        score.note(smoke=f"ended after {seconds:.1f} s")


@pytest.mark.scorecard
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_d7_one_of_two_processes_is_killed_at_random_steps(flavour, tmp_path):
    chance, waits = random.Random(7), []
    usual = replace(SHORT, flavour=flavour, out=str(tmp_path / "undisturbed"))
    done_together(usual)
    with Score("D7") as score:
        for number in range(KILLS // 2):
            options = replace(SHORT, flavour=flavour, out=str(tmp_path / f"run-{number}"))
            victim = int(number % 5 != 4)  # the lead once in a while
            problems, seconds = killed(options, victim, chance.randint(2, SHORT.steps - 2))
            done_together(options)
            score.add(problems + differences(options, usual), f"process {victim}")
            waits.append(seconds)
        score.note(**{flavour: f"the other ended after {max(waits):.1f} s at most, heartbeat {HEARTBEAT:g} s"})


@pytest.mark.scorecard
@pytest.mark.parametrize("signalled", [0, 1])
def test_d8_sigterm_to_one_process_stops_both_with_one_checkpoint(signalled, tmp_path, undisturbed):
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("D8") as score:
        job = Together(options, trouble={signalled: "term:30"})
        ended = job.wait()
        problems = [f"it ended with {one.code}: {one.text[-800:]}" for one in ended if one.code != 143]
        steps = [progress(of_process(options, index)) for index in (0, 1)]
        problems += [] if len(set(steps)) == 1 else [f"they stopped at {steps}"]
        kept = committed(options)
        problems += [] if kept[-1:] == steps[:1] else [f"the latest checkpoint is {kept}, the last step {steps}"]
        done_together(options)
        score.add(problems + differences(options, undisturbed), f"process {signalled} got the signal")


@pytest.mark.scorecard
@pytest.mark.parametrize("slow", [0, 1])
def test_d9_a_slow_process_is_named_within_a_hundred_steps(slow, tmp_path):
    options = replace(SHORT, out=str(tmp_path / "run"), steps=100, val_every=0, test=0)
    with Score("D9") as score:
        job = Together(options, pace={slow: "0.1", 1 - slow: "0.01"})
        ended = job.wait()
        named = re.findall(r"Process (\d) of 2 \(.*\) is slow", ended[0].text)
        score.check([one.code for one in ended] == [0, 0], f"they ended with {[one.code for one in ended]}")
        score.check(named == [str(slow)], f"named as slow: {named}; {ended[0].text[-1500:]}")


@pytest.mark.scorecard
def test_d9_equal_processes_are_not_called_slow(tmp_path):
    options = replace(SHORT, out=str(tmp_path / "run"), steps=100, val_every=0, test=0)
    with Score("D9") as score:
        ended = Together(options, pace={0: "0.05", 1: "0.05"}).wait()
        score.check("is slow" not in ended[0].text, ended[0].text[-1500:])


@pytest.mark.scorecard
def test_d10_a_hanging_step_tells_where_all_threads_are_and_ends_with_75(tmp_path):
    options = Options(out=str(tmp_path / "run"), steps=40, extras="hang", val_every=0, val_epochs=0, test=0)
    with Score("D10") as score:
        ended = run(options, trouble="hang:20")
        dump = (options.folder / "hang-0.txt").read_text()
        score.check(ended.code == 75, f"it ended with {ended.code}: {ended.text[-1500:]}")
        score.check("hang_in_step" in ended.text and "hang_in_step" in dump, f"the stacks do not tell: {dump}")
        score.check(ended.text.count("Thread 0x") >= 2, "not all threads are listed")
        score.check("the run hangs" in ended.text, ended.text[-500:])


@pytest.mark.scorecard
def test_d10_in_two_processes_the_one_that_hangs_is_ended_and_so_is_the_other(tmp_path):
    options = Options(out=str(tmp_path / "run"), steps=40, extras="hang", val_every=0, val_epochs=0, test=0)
    with Score("D10") as score:
        codes = [one.code for one in Together(options, trouble={0: "hang:20", 1: "hang:9999"}).wait()]
        score.check(75 in codes and 0 not in codes, f"they ended with {codes}")


@pytest.mark.scorecard
@pytest.mark.parametrize(("devices", "batch"), [(1, 8), (2, 8), (2, 4)])
def test_c5_two_processes_evaluate_every_example_once(devices, batch, tmp_path):
    found = [json.loads(pairs.lines(one)[-1]) for one in pairs.run(EVALUATION, str(batch), devices=devices)]
    with Score("C5") as score:
        for index, one in enumerate(found):
            score.check(one["count"] == 21, f"process {index} counted {one['count']}")
            wrong = {name: (a, b) for name, (a, b) in one["metrics"].items() if abs(a - b) > 1e-5 * max(1, abs(b))}
            score.check(not wrong, f"process {index}: (found, by numpy): {wrong}")


@pytest.mark.scorecard
def test_d5_ten_thousand_steps_of_two_processes_hold_no_more_than_a_thousand(tmp_path):
    options = Options(out=str(tmp_path / "run"), steps=10_000, log_every=50, val_every=500, save_every=50, val_epochs=0)
    options = replace(options, ledger=0, test=0)
    at = (999, 2599, 4999, 9799)
    trouble = ",".join(f"usage:{step}" for step in at)
    with Score("D5") as score:
        codes = [one.code for one in Together(options, trouble={0: trouble, 1: trouble}).wait(1800)]
        score.check(codes == [0, 0], f"they ended with {codes}")
        for index in (0, 1):
            found = lines(Path(of_process(options, index).out) / "usage.jsonl")
            grown = {name: round(found[-1][name] - found[0][name], 1) for name in ("MB", "arrays", "threads", "files")}
            score.check(grown["MB"] <= 8, f"process {index}: memory grew by {grown['MB']} MB: {found}")
            for name in ("arrays", "threads", "files"):
                score.check(abs(grown[name]) <= 2, f"process {index}: {name}: {found}")
            signalled = ", ".join(f"{change:+g} {name}" for name, change in grown.items())
            score.note(**{f"process {index} of two": signalled})


@pytest.mark.slow
def test_the_ledger_of_two_processes_is_that_of_one(tmp_path, undisturbed):
    alone = replace(SHORT, out=str(tmp_path / "alone"), devices=2)
    assert run(alone).code == 0
    assert ledger_differences(undisturbed, alone) == []
    assert saves(undisturbed) == saves(alone)
    assert result(undisturbed)["step"] == result(alone)["step"] == SHORT.steps
    assert ledger(of_process(undisturbed, 1)) == ledger(undisturbed)
