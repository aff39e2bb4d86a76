"""Cases with several processes, one of which is killed, preempted, slow, or hangs."""

import json
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scorecard.crashes import committed
from tests.scorecard.harness import Score, differences, ledger, ledger_differences, lines, progress, result, run, saves
from tests.scorecard.job import Options
from tests.scorecard.multi_process_job import HEARTBEAT, MultiProcessJob, process_options, run_multi_process
from tests.sharding.processes import pairs

KILLS = 10
SHORT = Options(out="", steps=60, val_every=25, val_epochs=0, test=1)
EVALUATION = Path(__file__).with_name("evaluation_job.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Options:
    """The undisturbed job in two processes."""
    options = replace(SHORT, out=str(tmp_path_factory.mktemp("multi_process") / "undisturbed"))
    run_multi_process(options)
    return options


def kill_one(options: Options, victim: int, step: int) -> tuple[list[str], float]:
    """Kills one process at a step; returns the problems of the other one, and the seconds until it exits."""
    job = MultiProcessJob(options, faults={victim: f"kill:{step}"})
    seconds = job.seconds_after(victim)
    ended = job.wait()
    other = ended[1 - victim]
    problems = [] if ended[victim].code == -signal.SIGKILL else [f"the victim exited with {ended[victim].code}"]
    problems += [] if other.code != 0 else ["the other one exited with 0"]
    problems += [f"it took {seconds:.1f} s"] if seconds > HEARTBEAT + 5 else []
    # if the primary process dies, JAX ends the others at once, with its own message
    names = r"Process 1 of 2 \(.*, pid \d+\)" if victim else "leader|Process 0"
    problems += [] if re.search(names, other.text) else [f"no process is named: {other.text[-1500:]}"]
    return problems, seconds


@pytest.mark.slow
def test_d7_a_process_is_killed_and_the_job_continues_bit_for_bit(tmp_path, undisturbed):
    options = replace(SHORT, out=str(tmp_path / "disturbed"))
    with Score("D7") as score:
        problems, seconds = kill_one(options, 1, 33)
        run_multi_process(options)
        score.add(problems + differences(options, undisturbed), "killed at 33")
        score.note(smoke=f"ended after {seconds:.1f} s")


@pytest.mark.scorecard
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_d7_one_of_two_processes_is_killed_at_random_steps(flavour, tmp_path):
    chance, waits = random.Random(7), []
    baseline = replace(SHORT, flavour=flavour, out=str(tmp_path / "undisturbed"))
    run_multi_process(baseline)
    with Score("D7") as score:
        for number in range(KILLS // 2):
            options = replace(SHORT, flavour=flavour, out=str(tmp_path / f"run-{number}"))
            victim = int(number % 5 != 4)  # sometimes the primary process
            problems, seconds = kill_one(options, victim, chance.randint(2, SHORT.steps - 2))
            run_multi_process(options)
            score.add(problems + differences(options, baseline), f"process {victim}")
            waits.append(seconds)
        score.note(**{flavour: f"the other ended after {max(waits):.1f} s at most, heartbeat {HEARTBEAT:g} s"})


@pytest.mark.scorecard
@pytest.mark.parametrize("signalled", [0, 1])
def test_d8_sigterm_to_one_process_stops_both_with_one_checkpoint(signalled, tmp_path, undisturbed):
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("D8") as score:
        job = MultiProcessJob(options, faults={signalled: "term:30"})
        ended = job.wait()
        problems = [f"it exited with {one.code}: {one.text[-800:]}" for one in ended if one.code != 143]
        steps = [progress(process_options(options, index)) for index in (0, 1)]
        problems += [] if len(set(steps)) == 1 else [f"they stopped at {steps}"]
        kept = committed(options)
        problems += [] if kept[-1:] == steps[:1] else [f"the checkpoints are {kept}, the last steps {steps}"]
        run_multi_process(options)
        score.add(problems + differences(options, undisturbed), f"process {signalled} got the signal")


@pytest.mark.scorecard
@pytest.mark.parametrize("slow", [0, 1])
def test_d9_a_slow_process_is_named_within_a_hundred_steps(slow, tmp_path):
    options = replace(SHORT, out=str(tmp_path / "run"), steps=100, val_every=0, test=0)
    with Score("D9") as score:
        job = MultiProcessJob(options, pace={slow: "0.1", 1 - slow: "0.01"})
        ended = job.wait()
        named = re.findall(r"Process (\d) of 2 \(.*\) is slow", ended[0].text)
        score.check([one.code for one in ended] == [0, 0], f"they exited with {[one.code for one in ended]}")
        score.check(named == [str(slow)], f"named as slow: {named}; {ended[0].text[-1500:]}")


@pytest.mark.scorecard
def test_d9_equally_fast_processes_are_not_named(tmp_path):
    options = replace(SHORT, out=str(tmp_path / "run"), steps=100, val_every=0, test=0)
    with Score("D9") as score:
        ended = MultiProcessJob(options, pace={0: "0.05", 1: "0.05"}).wait()
        score.check("is slow" not in ended[0].text, ended[0].text[-1500:])


@pytest.mark.scorecard
def test_d10_a_hanging_step_dumps_the_stacks_of_all_threads_and_exits_with_75(tmp_path):
    options = Options(out=str(tmp_path / "run"), steps=40, extras="hang", val_every=0, val_epochs=0, test=0)
    with Score("D10") as score:
        ended = run(options, faults="hang:20")
        dump = (options.folder / "hang-0.txt").read_text()
        score.check(ended.code == 75, f"it exited with {ended.code}: {ended.text[-1500:]}")
        score.check(
            "hang_in_step" in ended.text and "hang_in_step" in dump,
            f"the stacks do not contain the hanging call: {dump}",
        )
        score.check(ended.text.count("Thread 0x") >= 2, "not all threads are listed")
        score.check("hangs" in ended.text and "code 75" in ended.text, ended.text[-500:])


@pytest.mark.scorecard
def test_d10_a_hanging_process_ends_both_processes(tmp_path):
    options = Options(out=str(tmp_path / "run"), steps=40, extras="hang", val_every=0, val_epochs=0, test=0)
    with Score("D10") as score:
        codes = [one.code for one in MultiProcessJob(options, faults={0: "hang:20", 1: "hang:9999"}).wait()]
        score.check(75 in codes and 0 not in codes, f"they exited with {codes}")


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
def test_d5_ten_thousand_steps_of_two_processes_use_no_more_than_a_thousand(tmp_path):
    options = Options(out=str(tmp_path / "run"), steps=10_000, log_every=50, val_every=500, save_every=50, val_epochs=0)
    options = replace(options, ledger=0, test=0)
    at = (999, 2599, 4999, 9799)
    faults = ",".join(f"usage:{step}" for step in at)
    with Score("D5") as score:
        codes = [one.code for one in MultiProcessJob(options, faults={0: faults, 1: faults}).wait(1800)]
        score.check(codes == [0, 0], f"they exited with {codes}")
        for index in (0, 1):
            found = lines(Path(process_options(options, index).out) / "usage.jsonl")
            grown = {name: round(found[-1][name] - found[0][name], 1) for name in ("MB", "arrays", "threads", "files")}
            score.check(grown["MB"] <= 8, f"process {index}: memory grew by {grown['MB']} MB: {found}")
            for name in ("arrays", "threads", "files"):
                score.check(abs(grown[name]) <= 2, f"process {index}: {name}: {found}")
            changes = ", ".join(f"{change:+g} {name}" for name, change in grown.items())
            score.note(**{f"process {index} of two": changes})


@pytest.mark.slow
def test_the_ledger_of_two_processes_is_that_of_one(tmp_path, undisturbed):
    alone = replace(SHORT, out=str(tmp_path / "alone"), devices=2)
    assert run(alone).code == 0
    assert ledger_differences(undisturbed, alone) == []
    assert saves(undisturbed) == saves(alone)
    assert result(undisturbed)["step"] == result(alone)["step"] == SHORT.steps
    assert ledger(process_options(undisturbed, 1)) == ledger(undisturbed)
