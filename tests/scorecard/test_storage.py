"""Group B, in this process: damaged, foreign and changed checkpoints in a store."""

import math
import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.datasets import Position
from jax_trainer.testing import digest
from tests.scorecard.harness import Score, differences, reference, run, starts
from tests.scorecard.job import Options
from tests.scorecard.small_stores import captured_log, files_of, filled_store, state_at

pytestmark = pytest.mark.scorecard

GOLDENS = Path(__file__).parent / "goldens"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES = {"truncated": truncate, "deleted": Path.unlink, "zeroed": zero}


def fallback_problems(store: CheckpointStore, damaged: str, step: int) -> list[str]:
    """The problems of a store that must fall back to `step`, because the newest checkpoint is damaged."""
    with captured_log() as log:
        try:
            state, saved = store.restore("latest", like=state_at(0))
        except CheckpointError as error:
            return [f"it raises: {error}"]
    problems = [] if saved.step == step else [f"it restores step {saved.step}"]
    problems += [] if digest(state) == digest(state_at(saved.step)) else ["the restored state differs"]
    warnings = [text for text in log.messages if damaged in text]
    return problems + ([] if len(warnings) == 1 else [f"{len(warnings)} warnings name {damaged}: {log.messages}"])


def test_b1_each_damaged_file_is_found_and_the_next_checkpoint_restored(tmp_path):
    newest = filled_store(tmp_path / "original", (5, 10)).folder / "step_00000010"
    names = [file.relative_to(newest) for file in files_of(newest)]
    with Score("B1") as score:
        for name in names:
            for what, damage in DAMAGES.items():
                if what == "zeroed" and not any((newest / name).read_bytes()):
                    continue
                place = tmp_path / "copy"
                shutil.copytree(tmp_path / "original", place)
                damage(place / newest.name / name)
                score.add(fallback_problems(CheckpointStore(place), newest.name, 5), f"{name} {what}")
                shutil.rmtree(place)
        score.note(files=len(names))


def flips(tmp_path: Path, count: int) -> list[list[str]]:
    """Flips `count` single bits, one at a time, in all files in turn; returns the problems of each."""
    store = filled_store(tmp_path, (5, 10))
    chance, files = random.Random("B2"), files_of(store.folder / "step_00000010")
    files = [file for file in files if file.stat().st_size]
    found = []
    for number in range(count):
        file = files[number % len(files)]
        original = bytearray(file.read_bytes())
        place, bit = chance.randrange(len(original)), chance.randrange(8)
        flipped = bytearray(original)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        problems = fallback_problems(CheckpointStore(store.folder), "step_00000010", 5)
        found.append([f"bit {bit} of byte {place} of {file.name}: {problem}" for problem in problems])
        file.write_bytes(original)
    return found


def test_b2_a_single_flipped_bit_is_found(tmp_path):
    with Score("B2") as score:
        for problems in flips(tmp_path / "checkpoints", 5):
            score.add(problems)


def test_b2_a_hundred_flipped_bits_are_found(tmp_path):
    with Score("B2") as score:
        for problems in flips(tmp_path / "checkpoints", 100):
            score.add(problems)


@pytest.mark.parametrize("what", DAMAGES)
def test_b1_a_run_resumes_from_the_checkpoint_before_a_damaged_one(what, tmp_path, references):
    options = Options(out=str(tmp_path / "run"), steps=70)
    undisturbed = reference(options, references)
    with Score("B1") as score:
        for step in (23, 41):
            assert run(options, faults=f"kill:{step}").code == -9
            newest = max((options.folder / "checkpoints").glob("step_*"))
            largest = max(files_of(newest), key=lambda file: file.stat().st_size)
            DAMAGES[what](largest)
        ended = run(options)
        problems = [] if newest.name in ended.text else [f"no warning names {newest.name}: {ended.text[-1000:]}"]
        problems += [] if ended.code == 0 else [f"exit code {ended.code}: {ended.text[-1000:]}"]
        problems += [] if starts(options)[-1] < int(newest.name[5:]) else [f"it resumed from {starts(options)[-1]}"]
        score.add(problems or differences(options, undisturbed), what)


def test_b3_strange_things_among_the_checkpoints_are_ignored(tmp_path):
    store = filled_store(tmp_path / "checkpoints", (5, 10))
    (store.folder / "9").mkdir()
    (store.folder / "abc").mkdir()
    (store.folder / "step_10.tmp").mkdir()
    (store.folder / "100").write_text("a file")
    (store.folder / "loop").symlink_to(store.folder)
    (store.folder / "step_00000099").symlink_to(store.folder / "loop")
    with Score("B3") as score:
        with captured_log() as log:
            state, saved = CheckpointStore(store.folder).restore("latest", like=state_at(0))
        # one of them all, and one of the link, which has the name of a checkpoint
        score.check(len(log.messages) == 2, f"{len(log.messages)} warnings: {log.messages}")
        score.check(saved.step == 10 and digest(state) == digest(state_at(10)), f"step {saved.step} is restored")
        again = CheckpointStore(store.folder, keep_latest=2)
        again.save(state_at(15), Position(1, 15), {"loss": 0.1})
        score.check(again.steps()[-1] == 15, "saving beside them fails")
        there = {path.name for path in store.folder.iterdir()}
        score.check({"9", "abc", "100", "loop"} <= there, f"foreign files are gone: {sorted(there)}")


def test_b3_an_empty_folder_with_the_name_of_a_checkpoint_is_damaged(tmp_path):
    store = filled_store(tmp_path / "checkpoints", (5, 10))
    (store.folder / "step_00000099").mkdir()
    with Score("B3") as score:
        score.add(fallback_problems(CheckpointStore(store.folder), "step_00000099", 10))


SEQUENCES = {
    "falling": [0.9, 0.8, 0.7, 0.6, 0.5],
    "rising": [0.5, 0.6, 0.7, 0.8, 0.9],
    "ties": [0.5, 0.5, 0.4, 0.4, 0.5],
    **{f"nan at {n}": [math.nan if k == n else 0.5 + 0.1 * k for k in range(5)] for n in range(5)},
    **{f"inf at {n}": [math.inf if k == n else 0.9 - 0.1 * k for k in range(5)] for n in (0, 2, 4)},
    "only nan": [math.nan] * 5,
}
STEPS = (9, 10, 99, 100, 1000)


def oracle(steps: tuple[int, ...], values: list[float], mode: str) -> set[int]:
    """The two latest, and the two best that are not NaN; the later one of equals."""
    sign = 1 if mode == "min" else -1
    comparable = [(sign * value, -step) for step, value in zip(steps, values, strict=True) if not math.isnan(value)]
    return {*steps[-2:], *(-step for _, step in sorted(comparable)[:2])}


def kept_steps(folder: Path, steps: tuple[int, ...], values: list[float], mode: str, restart: bool) -> list[set[int]]:
    """The checkpoints after each save."""
    options = {"keep_latest": 2, "keep_best": 2, "monitor": "m", "mode": mode}
    store, kept = CheckpointStore(folder, **options), []
    for index, (step, value) in enumerate(zip(steps, values, strict=True)):
        if restart and index == 3:
            store = CheckpointStore(folder, **options)
        store.save(state_at(step, {"w": jnp.zeros(())}, optax.identity()), Position(1, step), {"m": value})
        kept.append(set(store.steps()))
    return kept


def check_retention(score: Score, folder: Path, names: list[str]) -> None:
    """Compares the checkpoints that a store keeps with the oracle."""
    for name in names:
        for mode in ("min", "max"):
            values = SEQUENCES[name]
            found = kept_steps(folder / f"{name}-{mode}", STEPS, values, mode, restart=mode == "max")
            # a deleted checkpoint cannot come back, so the oracle is applied to the remaining ones
            expected: list[set[int]] = []
            for count in range(1, len(STEPS) + 1):
                there = tuple(sorted({*(expected[-1] if expected else ()), STEPS[count - 1]}))
                expected.append(oracle(there, [values[STEPS.index(step)] for step in there], mode))
            score.check(found == expected, f"{name}, {mode}: {found} instead of {expected}")


def test_b13_the_best_and_the_latest_are_kept(tmp_path):
    with Score("B13") as score:
        check_retention(score, tmp_path, ["rising", "ties", "nan at 1", "only nan"])


def test_b13_the_best_and_the_latest_are_kept_for_every_sequence(tmp_path):
    with Score("B13") as score:
        check_retention(score, tmp_path, list(SEQUENCES))
        store = CheckpointStore(tmp_path / "missing", monitor="val/loss")
        with pytest.raises(ValueError, match=r"val/loss.*acc, loss"):
            store.save(state_at(1), Position(1, 1), {"loss": 0.1, "acc": 0.2})
        score.add([], "a missing metric")


CHANGED = {
    "shape": ({"dense": {"kernel": jnp.zeros((4, 7)), "bias": jnp.zeros(3)}}, ["kernel", "(4, 7)", "(4, 3)"]),
    "dtype": (
        {"dense": {"kernel": jnp.zeros((4, 3), jnp.bfloat16), "bias": jnp.zeros(3)}},
        ["kernel", "bfloat16", "float32"],
    ),
    "missing": ({"dense": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3), "scale": jnp.zeros(9)}}, ["scale"]),
    "extra": ({"dense": {"kernel": jnp.zeros((4, 3))}}, ["bias"]),
    "renamed": ({"linear": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}}, ["dense.kernel", "linear.kernel"]),
}


@pytest.mark.parametrize("what", CHANGED)
def test_b14_a_changed_model_is_reported_leaf_by_leaf(what, tmp_path):
    params, words = CHANGED[what]
    store = filled_store(tmp_path / "checkpoints", (5,))
    with Score("B14") as score:
        with pytest.raises(CheckpointError) as caught:
            store.restore("latest", like=state_at(0, params), only=("params",))
        text = (
            str(caught.value).replace("[", "(").replace("]", ")").replace("(4,3)", "(4, 3)").replace("(4,7)", "(4, 7)")
        )
        missing = [word for word in words if word not in text]
        score.check(not missing, f"{what}: {missing} are not in: {text}")


def test_b14_a_restore_casts_skips_and_renames_leaves_on_request(tmp_path):
    store = filled_store(tmp_path / "checkpoints", (5,))
    with Score("B14") as score:
        with pytest.raises(CheckpointError):
            store.restore("latest", like=state_at(0, tx=optax.sgd(0.1, momentum=0.9)))
        cast = store.restore("latest", like=state_at(0, CHANGED["dtype"][0]), only=("params",), cast=True)[0]
        score.check(cast.params["dense"]["kernel"].dtype == jnp.bfloat16, "cast")
        partial = store.restore("latest", like=state_at(0, CHANGED["missing"][0]), only=("params",), partial=True)[0]
        score.check(float(partial.params["dense"]["kernel"][0, 0]) == 5.0, "partial")
        names = {"params.dense.*": "params.linear.*"}
        renamed = store.restore("latest", like=state_at(0, CHANGED["renamed"][0]), only=("params",), rename=names)[0]
        score.check(float(renamed.params["linear"]["kernel"][0, 0]) == 5.0, "rename")


def test_b15_checkpoints_of_earlier_formats_are_read(tmp_path):
    goldens = sorted(GOLDENS.iterdir())
    with Score("B15") as score:
        for golden in goldens:
            place = tmp_path / golden.name
            shutil.copytree(golden, place)
            state, saved = CheckpointStore(place).restore("latest", like=state_at(0))
            score.check(digest(state) == digest(state_at(7)), golden.name)
            score.check((saved.step, saved.position) == (7, Position(1, 7)), f"{golden.name}: {saved}")
        score.note(formats=len(goldens))
