"""What every style promises: the same model, data, seed and optimizer give the same bits, and nothing is lost."""

import inspect
import logging
import re
import traceback
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_trainer import NonFiniteError, TrainState
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.testing import assert_same_bits, fault
from tests.styles.style_runs import BAD, SAVE, STEPS, STYLES, TOTAL, InterruptedData, Outcome, SpoiltData, failing

pytestmark = pytest.mark.usefixtures("quiet_log")
EVERY = pytest.mark.parametrize("name", STYLES)


def usually(*names: str) -> pytest.MarkDecorator:
    """The styles `names` always, the others in the slow tests."""
    cases = [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in STYLES]
    return pytest.mark.parametrize("name", cases)


@pytest.fixture(autouse=True)
def quiet_log(caplog):
    caplog.set_level(logging.ERROR, "jax_trainer")


@pytest.fixture
def compiled():
    """One entry for every compilation since the test began."""
    seen: list[str] = []

    def note(event: str, duration_secs: float, **more: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(more.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Each style's training from start to end, done once."""

    @cache
    def train(name: str) -> tuple[Outcome, Path]:
        folder = tmp_path_factory.mktemp("straight")
        return STYLES[name](folder).train(), folder

    return train


def reference(name: str) -> str:
    return f"TrainerModule, {STYLES[name].flavour}"


@EVERY
def test_every_style_comes_to_the_same_bits(straight, name):
    (mine, _), (other, _) = straight(name), straight(reference(name))
    assert_same_bits(mine.params, other.params)
    assert_same_bits(mine.model_state, other.model_state)


@EVERY
def test_every_style_logs_the_same_history(straight, name):
    history = straight(name)[0].history
    assert set(history) == set(range(STEPS, TOTAL + 1, STEPS))
    assert history == straight(reference(name))[0].history


@usually("fit, a state", "TrainLoop")
def test_a_second_training_of_the_same_kind_compiles_nothing(straight, name, tmp_path, compiled):
    first = straight(name)[0]
    compiled.clear()
    again = STYLES[name](tmp_path).train()
    assert [one for one in compiled if one != "jit(<lambda>)"] == []  # with which a user makes a state to pass
    assert_same_bits((again.params, again.model_state), (first.params, first.model_state))


@EVERY
def test_the_last_checkpoint_of_every_style_has_its_last_weights(straight, name):
    outcome, folder = straight(name)
    last = max(STYLES[name](folder).checkpoints, key=lambda path: path.name)
    assert last.name == f"step_{TOTAL:08d}"
    empty = jax.tree.map(jnp.zeros_like, (outcome.params, outcome.model_state))
    like = TrainState(jnp.zeros((), jnp.int32), *empty, opt_state=(), rng=jnp.zeros(2, jnp.uint32), extra={})
    state, _ = CheckpointStore(last.parent).restore(last, like, only=("params", "model_state"))
    assert_same_bits((state.params, state.model_state), (outcome.params, outcome.model_state))


@usually("fit, a state", "fit, nnx", "train_fn", "TrainLoop")
def test_every_style_resumes_after_a_failure_to_the_same_bits(straight, name, tmp_path):
    style = STYLES[name]
    with fault(f"step:raise:{STEPS + 2}"), pytest.raises(FaultInjected):
        style(tmp_path).train()
    assert style(tmp_path).checkpoints
    resumed, through = style(tmp_path).train(resume=True), straight(name)[0]
    assert_same_bits(resumed.params, through.params)
    assert_same_bits(resumed.model_state, through.model_state)
    assert resumed.history.items() <= through.history.items()
    assert TOTAL in resumed.history


@EVERY
def test_giving_the_command_of_a_finished_run_again_changes_nothing(straight, name):
    first, folder = straight(name)
    before = contents(folder)
    again = STYLES[name](folder).train(resume=True)
    assert_same_bits((again.params, again.model_state), (first.params, first.model_state))
    assert again.history.items() <= first.history.items()
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, bytes]:
    """The files below `folder`, but for messages, starts and times: weights, averages, the rows of metrics."""
    left_out = ("run.log", "run.json", "time.jsonl", ".lock")
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@EVERY
def test_a_failing_loss_is_reported_with_the_users_line_first(name, tmp_path):
    with pytest.raises(TypeError) as caught:
        STYLES[name](tmp_path, failing).train()
    line = inspect.getsourcelines(failing)[1] + 1
    first = caught.value.__notes__[0]
    assert first.startswith(f'In your code: File "{inspect.getsourcefile(failing)}", line {line}, in failing')
    assert not STYLES[name](tmp_path).checkpoints


@usually("fit, a state")
def test_a_loss_that_is_not_finite_ends_every_style_before_it_is_saved(name, tmp_path):
    with pytest.raises(NonFiniteError, match=f"Step {BAD}: the loss was"):
        STYLES[name](tmp_path).train(SpoiltData())
    saved = {path.name for path in STYLES[name](tmp_path).checkpoints}
    assert saved and max(saved) < f"step_{BAD:08d}"


@usually("train_fn", "TrainLoop")
def test_ctrl_c_leaves_a_valid_checkpoint_that_is_resumed(ctrl_c, straight, name, tmp_path):
    style = STYLES[name]
    with pytest.raises(KeyboardInterrupt) as end:
        style(tmp_path).train(InterruptedData(tmp_path))
    shown = "".join(traceback.format_exception(end.value))
    assert "another exception" not in shown and "direct cause" not in shown
    if name != "TrainLoop":  # between whose steps there is the user's code, where Ctrl-C is Python's own
        assert re.search(r"KeyboardInterrupt: Interrupted after step \d+ .*resume", shown, re.IGNORECASE)
    saved = style(tmp_path).checkpoints
    assert [CheckpointStore(path.parent).verify(path) for path in saved] == [""] * len(saved)
    assert max(int(path.name.removeprefix("step_")) for path in saved) >= SAVE
    assert_same_bits(style(tmp_path).train(resume=True).params, straight(name)[0].params)


def test_the_reference_learns_something(straight):
    history = straight("TrainerModule, linen")[0].history
    assert history[TOTAL] < history[STEPS]
