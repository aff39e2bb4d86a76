"""Group A: crash and resume. Every case is compared with the undisturbed run, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from tests.scorecard.crashes import committed, committed_in, kill_after, kill_at, send_signals, terminate
from tests.scorecard.harness import (
    Child,
    Score,
    child_environment,
    differences,
    ledger,
    ledger_differences,
    reference,
    result,
    run,
    run_until_done,
    saves,
    starts,
)
from tests.scorecard.job import EPOCH, EXAMPLES, Options

pytestmark = pytest.mark.scorecard

SHORT = Options(out="", steps=70)
KILLS = int(os.environ.get("JAX_TRAINER_KILLS", "50"))
POINTS = (
    "after_tmp_dir",
    "mid_array",
    "before_manifest",
    "before_rename",
    "after_rename",
    "mid_delete",
    "before_best_table",
)


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a1_kills_at_random_times_change_nothing(flavour, tmp_path, references):
    options = Options(out="", flavour=flavour)
    undisturbed = reference(options, references)
    seconds = run(replace(options, out=str(tmp_path / "timed"))).seconds  # with a warm compilation cache
    chance, kills, finished = random.Random(f"A1 {flavour}"), 0, 0
    with Score("A1") as score:
        while kills < KILLS:
            options, here = replace(options, out=str(tmp_path / f"run-{finished}")), 0
            while kills < KILLS and kill_after(options, chance.uniform(0, seconds)):
                kills, here = kills + 1, here + 1
            restarts = run_until_done(options)
            problems = differences(options, undisturbed)
            problems += [f"it took {restarts} commands to finish"] if restarts > 1 else []
            for _ in range(here or bool(problems)):  # a run without kills counts only if it has problems
                score.add(problems, f"run {finished} of {flavour}, killed {here} times")
            finished += 1
        score.note(**{flavour: f"{kills} kills in {finished} runs of {seconds:.0f} s"})


@pytest.mark.parametrize("point", POINTS)
def test_a2_kills_while_saving_lose_at_most_one_interval(point, tmp_path, references):
    undisturbed = reference(SHORT, references)
    with Score("A2") as score:
        for nth in (2, 1, 4, 7, 11)[: max(1, KILLS // 10)]:
            options = replace(SHORT, out=str(tmp_path / f"{nth}"))
            problems = kill_at(options, f"{point}:kill:{nth}")
            problems += kill_at(options, f"{point}:kill:2")  # and again, in another process
            run_until_done(options)
            score.add(problems + differences(options, undisturbed), f"{point}, passage {nth}")


@pytest.mark.parametrize("point", ["mid_replace", "mid_convert"])
def test_a2_kills_while_a_checkpoint_is_rewritten_lose_nothing(point, tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("A2") as score:
        problems = kill_at(options, f"{point}:kill:1")
        run_until_done(options)
        score.add(problems + differences(options, undisturbed), point)


CONFIGURATIONS = {
    "linen": {},
    "nnx": {"flavour": "nnx"},
    "chunks": {"steps_per_call": 4, "flavour": "nnx"},
    "resident": {"resident": 1, "steps_per_call": 8},
    "grain": {"threads": 1},
    "epochs only": {"val_every": 0, "flavour": "nnx"},
    "no validation": {"val_every": 0, "val_epochs": 0, "test": 0},
    "micro-batches": {"accumulate": 3, "flavour": "nnx"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a3_kills_inside_and_at_the_ends_of_epochs_change_nothing(name, tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "run"), **CONFIGURATIONS[name])
    undisturbed = reference(options, references)
    places = [
        "kill:8",
        "kill:17",
        "kill:26",
        f"kill:{EPOCH}",
        "kill_epoch:1",
        f"kill:{EPOCH + 1}",
        "kill_eval:40",
        "kill:64",
    ]
    if options.steps_per_call > 1:  # the ends of dispatches
        places = ["kill:10", "kill:20", "kill:30", f"kill:{EPOCH}", "kill_epoch:1", "kill_eval:40", "kill:64"]
    if not options.val_epochs and not options.val_every:
        places.remove("kill_eval:40")
    with Score("A3") as score:
        problems = []
        for place in places:
            ended = run(options, faults=place)
            problems += (
                [] if ended.code == -signal.SIGKILL else [f"{place}: not killed, {ended.code}: {ended.text[-1000:]}"]
            )
        run_until_done(options)
        score.add(problems + differences(options, undisturbed) + _epochs(options), name)
        score.note(**{name: f"resumed from {starts(options)[1:]}"})


def _epochs(options: Options) -> list[str]:
    """Checks in the ledger that every epoch has every example once."""
    ids = [row["ids"] for row in ledger(options)]
    epochs = [sorted(chain(*ids[first : first + EPOCH])) for first in range(0, len(ids) - EPOCH + 1, EPOCH)]
    every = list(range(EXAMPLES))
    return [f"epoch {n} does not have every example once" for n, ids in enumerate(epochs, 1) if ids != every]


def test_a4_kills_inside_an_accumulation_window_change_nothing(tmp_path, references):
    with Score("A4") as score:
        for flavour in ("linen", "nnx"):
            options = replace(SHORT, out=str(tmp_path / flavour), flavour=flavour, window=3)
            undisturbed = reference(options, references)
            problems = []
            for step in (7, 23, 41, 62):
                ended = run(options, faults=f"kill:{step}")
                problems += [] if ended.code == -signal.SIGKILL else [f"not killed at {step}: {ended.text[-1000:]}"]
            run_until_done(options)
            score.add(problems + differences(options, undisturbed), flavour)
            score.note(**{flavour: f"resumed from {starts(options)[1:]}"})


SIGTERMS = {
    "train": {"faults": "mark:23"},
    "eval": {"faults": "mark_eval:20"},
    "start": {"faults": "mark_start", "saved": False},
    "save": {"faults": "mark:21", "failpoint": "mid_array:sleep=2:4", "within": 7.0},
    "blocked loader": {"faults": "block:23"},
}


@pytest.mark.parametrize("place", SIGTERMS)
def test_a5_sigterm_saves_the_current_step_and_exits_with_143(place, tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("A5") as score:
        problems = terminate(options, **SIGTERMS[place])
        run_until_done(options)
        score.add(problems + differences(options, undisturbed), place)


def test_a6_a_second_signal_does_not_wait_for_the_final_save(tmp_path, references):
    undisturbed = reference(SHORT, references)
    with Score("A6") as score:
        for name, number, codes in (("SIGTERM", signal.SIGTERM, (143, -15)), ("Ctrl-C", signal.SIGINT, (130, -2))):
            options = replace(SHORT, out=str(tmp_path / name))
            # the third save, after those of steps 5 and 10, is that of the first signal: it takes a minute
            ended, seconds = send_signals(options, "mark:12", [number, number], failpoint="before_rename:sleep=60:3")
            problems = [] if ended.code in codes else [f"the exit code is {ended.code}: {ended.text[-1500:]}"]
            problems += [] if seconds <= 5 else [f"it took {seconds:.1f} s to exit"]
            problems += (
                [] if 10 in committed(options) else [f"the checkpoints are {committed(options)}, without step 10"]
            )
            run_until_done(options)
            score.add(problems + differences(options, undisturbed), name)
        options = replace(SHORT, out=str(tmp_path / "one"))
        problems = terminate(options, "mark:12", number=signal.SIGINT, code=(130, -2))
        run_until_done(options)
        score.add(problems + differences(options, undisturbed), "one Ctrl-C")


@pytest.mark.parametrize("place", ["loss", "callback:17", "loader:23", "val:2"])
def test_a7_an_exception_is_shown_and_the_run_can_be_resumed(place, tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("A7") as score:
        ended = run(options, faults=place)
        latest, copied = max(committed(options), default=0), max(saves(options), default=0)
        problems = [] if ended.code == 1 else [f"the exit code is {ended.code}"]
        problems += (
            []
            if "InjectedError: " in ended.text and "Traceback" in ended.text
            else [f"no traceback: {ended.text[-500:]}"]
        )
        problems += [] if latest == copied else [f"step {copied} was to be saved, {latest} is the latest"]
        run_until_done(options)
        score.add(problems + differences(options, undisturbed), place)
        score.note(**{place.partition(":")[0]: f"resumed from {starts(options)[-1]}"})


_SAVE_AND_EXIT = textwrap.dedent("""
    import sys
    from pathlib import Path
    import jax, jax.numpy as jnp, optax
    from jax_trainer.checkpoint.store import CheckpointStore
    from jax_trainer.core.state import new_state
    from jax_trainer.datasets import Position
    state = new_state({"w": jnp.arange(300_000.0)}, {}, optax.adam(1e-3), jax.random.key(0))
    for number in range(10):
        mode, store = sys.argv[2], CheckpointStore(Path(sys.argv[1]) / str(number))
        store.save(state.replace(step=jnp.asarray(3, jnp.int32)), Position(1, 3), {"loss": 1.0}, wait=False)
    if mode == "raise":
        raise RuntimeError("injected")
    if mode == "exit":
        sys.exit(3)
""")


def test_a8_a_process_that_exits_during_a_save_has_saved(tmp_path):
    with Score("A8") as score:
        for mode, code in (("return", 0), ("raise", 1), ("exit", 3)):
            folder = tmp_path / mode
            environment = child_environment(SHORT, {})
            words = [sys.executable, "-c", _SAVE_AND_EXIT, str(folder), mode]
            ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert ended.returncode == code, ended.stderr
            for place in sorted(folder.iterdir()):
                score.check(committed_in(place) == [3], f"{mode}: {place.name}")


def test_a9_ten_resumes_of_one_step_each_change_nothing(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "run"), flavour="nnx")
    undisturbed = reference(options, references)
    with Score("A9") as score:
        problems = []
        for _ in range(10):
            ended = run(options, faults="term:1")
            problems += [] if ended.code == 143 else [f"exit code {ended.code}: {ended.text[-1000:]}"]
        run_until_done(options)
        score.add(problems + differences(options, undisturbed))
        score.note(resumed_from=starts(options)[1:])


def test_a10_a_finished_run_takes_no_more_steps(tmp_path, references):
    undisturbed = reference(SHORT, references)
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("A10") as score:
        run_until_done(options)
        (Path(options.out) / "result.json").unlink()
        run_until_done(options)
        score.add(differences(options, undisturbed), "a finished run")
        score.check(
            starts(options)[-1] in (0, SHORT.steps) and len(ledger(options)) == SHORT.steps,
            f"starts: {starts(options)}",
        )


@pytest.mark.parametrize("first", [EPOCH - 1, EPOCH, EPOCH + 1, 2 * EPOCH])
def test_a10_a_longer_plan_continues_where_the_shorter_one_ended(first, tmp_path, references):
    base = replace(SHORT, schedule=400)
    undisturbed = reference(base, references)
    short = replace(base, out=str(tmp_path / "run"), steps=first)
    with Score("A10") as score:
        run_until_done(short)
        score.check(len(ledger(short)) == first, f"{len(ledger(short))} steps instead of {first}")
        longer = replace(base, out=short.out, resume=str(short.folder))
        run_until_done(longer)
        problems = ledger_differences(longer, undisturbed, keys=("step", "ids", "lr", "loss"))
        same = result(longer)["digest"] == result(undisturbed)["digest"]
        score.add(problems + ([] if same else ["the states differ"]), f"{first} steps, then {SHORT.steps}")


def test_a10_more_epochs_continue_where_fewer_ended(tmp_path, references):
    base = replace(SHORT, steps=3 * EPOCH, schedule=400)
    undisturbed = reference(base, references)
    short = replace(base, out=str(tmp_path / "run"), epochs=2)
    with Score("A10") as score:
        run_until_done(short)
        longer = replace(short, epochs=1000, resume=str(short.folder))
        run_until_done(longer)
        problems = ledger_differences(longer, undisturbed, keys=("step", "ids", "lr", "loss"))
        same = result(longer)["digest"] == result(undisturbed)["digest"]
        score.add(problems + ([] if same else ["the states differ"]), "2 epochs, then 3")


def test_a11_the_examples_do_not_depend_on_the_flavour_or_on_threads(tmp_path, references):
    undisturbed = reference(SHORT, references)
    with Score("A11") as score:
        score.add(ledger_differences(reference(replace(SHORT, flavour="nnx"), references), undisturbed), "nnx")
        options = replace(SHORT, out=str(tmp_path / "run"))
        problems = []
        for threads, step in ((1, 12), (3, 28), (2, 47)):
            ended = run(replace(options, threads=threads), faults=f"kill:{step}")
            problems += [] if ended.code == -signal.SIGKILL else [f"{threads}: {ended.code} {ended.text[-1000:]}"]
        run_until_done(replace(options, threads=1))
        score.add(problems + differences(options, undisturbed), "1, 3, 2 and 1 threads")


def test_a12_a_run_continues_with_another_number_of_devices(tmp_path, references):
    # batches that two devices can share
    base = replace(SHORT, examples=31 * 32, steps=24, val_every=0, val_epochs=0, test=0)
    undisturbed = reference(base, references)
    options = replace(base, out=str(tmp_path / "run"))
    with Score("A12") as score:
        ended = run(options, faults="kill:17")
        assert ended.code == -signal.SIGKILL, ended.text[-1000:]
        ended = run(replace(options, devices=2))
        problems = [] if ended.code == 0 else [f"exit code {ended.code}: {ended.text[-2000:]}"]
        if not problems:
            problems += ledger_differences(options, undisturbed)
            distance = max(_distances(options, undisturbed))
            problems += [] if distance <= 1e-6 else [f"parameters differ by {distance:.1e}"]
            problems += [] if starts(options)[-1] >= 10 else [f"it resumed from step {starts(options)[-1]}"]
            score.note(max_distance=f"{distance:.1e}")
        score.add(problems, "1 device, then 2")
        score.check("bit" in ended.text, "no message that the result is not bit-identical")


def _distances(options: Options, other: Options) -> list[float]:
    found, expected = (np.load(Path(one.out) / "params.npz") for one in (options, other))
    # a bias before a norm has no effect: its gradient is rounding noise, which Adam scales up like any other
    names = [name for name in expected if not ("hidden" in name and "bias" in name)]
    return [float(np.abs(found[name] - expected[name]).max()) for name in names]


def test_a13_only_the_seed_determines_the_result(tmp_path, references):
    undisturbed = reference(SHORT, references)
    with Score("A13") as score:
        for number in range(max(2, KILLS // 5)):
            options = replace(SHORT, out=str(tmp_path / f"run-{number}"))
            elsewhere = tmp_path / f"cwd-{number}"
            elsewhere.mkdir()
            environment = {"PYTHONHASHSEED": str(number), "TZ": ["UTC", "Asia/Tokyo", "America/New_York"][number % 3]}
            ended = Child(options, cwd=elsewhere, **environment).wait()
            assert ended.code == 0, ended.text[-2000:]
            score.add(differences(options, undisturbed), f"run {number}")
