from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score

from jax_trainer.core import LogFreq, LogMetricMode, LogMode
from jax_trainer.core.metric_accumulator import WindowAccumulator
from jax_trainer.core.metric_buffer import Column
from jax_trainer.engine import Every, StopTraining
from jax_trainer.metrics import F1
from jax_trainer.styles.hooks import MetricReport, Mirror, every_n_steps, get_ema_hook
from jax_trainer.testing import assert_same_bits
from tests.styles.functional.functional_runs import Calls, arrays, data, fresh, train_step, trained, val_step


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which the caller's model is written."""
    steps: list[int] = []
    write = Mirror._write

    def noting(mirror: Any, state: Any) -> None:
        steps.append(int(state.step))
        write(mirror, state)

    monkeypatch.setattr(Mirror, "_write", noting)
    return steps


def test_a_hook_is_called_when_it_wants_to_be_and_other_steps_do_not_write_the_model(writes, caplog):
    often, seldom = Calls(3), Calls(6)
    trained(hooks=[often, seldom])
    assert (list(often.metrics), list(seldom.metrics)) == ([3, 6, 9], [6])
    assert writes == [3, 6, 9, 10]  # and at the end
    assert "every step" not in caplog.text


def test_a_hook_without_an_interval_is_called_after_every_step_with_a_warning(writes, caplog):
    steps = []

    def hook(step: int, *, model: Any, **kwargs: Any) -> None:
        steps.append(step)

    trained(n_steps=4, hooks=[hook])
    assert steps == [1, 2, 3, 4]
    assert writes == [1, 2, 3, 4, 4]
    assert caplog.text.count("`hook`") == 1
    assert "every_n_steps(100)(hook)" in caplog.text


def test_a_hook_sees_the_model_of_its_step_in_evaluation_mode_and_may_keep_it():
    kept = {}

    @every_n_steps(2)
    def hook(step: int, *, model: Any, optimizer: Any, metrics: Any) -> None:
        assert model.dropout.deterministic
        assert int(optimizer.step.get_value()) == step
        kept[step] = (model.out.kernel[...], optimizer.opt_state[0].trace["out"]["kernel"][...])

    trained(n_steps=6, hooks=[hook])
    (weights, moments, _) = arrays(trained(n_steps=4))
    np.testing.assert_array_equal(kept[4][0], weights["out"]["kernel"])
    np.testing.assert_array_equal(kept[4][1], moments[0].trace["out"]["kernel"])
    assert len({np.asarray(kernel).tobytes() for kernel, _ in kept.values()}) == 3


def test_a_hook_comes_after_the_evaluation_of_its_step_and_else_knows_the_last_one():
    def evaluated(model: Any, rng_key: Any, batch: Any) -> Any:
        return val_step(model, rng_key, batch)[0]

    often, seldom = Calls(1), Calls(4)
    subject = trained(n_steps=6, hooks=[often, seldom], fns=(train_step, evaluated))
    assert "val/loss" not in often.metrics[3]
    assert seldom.metrics[4] == often.metrics[4]
    assert often.metrics[5]["val/loss"] == often.metrics[4]["val/loss"]
    assert often.metrics[6]["val/loss"] != often.metrics[4]["val/loss"]  # the last step is evaluated, too
    assert {"train/loss", "train/acc", "optimizer/grad_global_norm"} < set(often.metrics[1])
    assert int(subject[1].step.get_value()) == 6


def test_a_decorated_hook_also_keeps_its_steps_in_other_loops():
    steps = []
    hook = every_n_steps(3)(lambda step, **kwargs: steps.append(step))
    for step in range(1, 8):
        hook(step, model=None)
    assert steps == [3, 6]


def test_a_hook_can_stop_training():
    @every_n_steps(3)
    def hook(step: int, **kwargs: Any) -> None:
        raise StopTraining("enough")

    subject = trained(hooks=hook)  # one alone
    assert_same_bits(arrays(subject), arrays(trained(n_steps=3)))


def test_a_hook_that_fails_ends_training_with_its_own_error():
    def hook(step: int, **kwargs: Any) -> None:
        raise LookupError("nothing there")

    subject = fresh()
    with pytest.raises(LookupError, match="nothing there"):
        trained(subject, hooks=[hook])
    assert int(subject[1].step.get_value()) == 1


def test_a_hook_that_could_not_be_called_is_refused(subtests):
    for hook, message in [
        (lambda step, model: None, r"`<lambda>` cannot be called as .* unexpected keyword argument 'optimizer'"),
        (lambda **kwargs: None, "too many positional arguments"),
        ("hook", "got a str"),
    ]:
        with subtests.test(hook=hook, message=message), pytest.raises(TypeError, match=message):
            trained(hooks=[hook])


def test_a_hook_with_an_impossible_interval_is_refused():
    with pytest.raises(ValueError, match="`every_n_steps` must be .* of at least 1, got 0"):
        every_n_steps(0)
    with pytest.raises(TypeError, match="`every_n_steps`.*EmaHook"):
        every_n_steps(2)(get_ema_hook(fresh()[0])[0])
    with pytest.raises(ValueError, match="of the hook `Calls` must be"):
        trained(hooks=[Calls(-2)])


def test_a_hook_sees_metrics_that_are_computed_from_statistics_also_right_after_resuming():
    columns = {"share": Column(LogMetricMode.SUM, LogFreq.ANY, LogMode.ANY, np.ones((1, 2)), np.ones(1), np.mean)}
    state = MetricReport(Every()).state_dict()
    accumulator = WindowAccumulator()
    accumulator.add_columns(columns)
    report = MetricReport(Every(), computes={"share": np.mean})
    report.load_state_dict({**state, "window": accumulator.state()})
    assert report.metrics() == report.metrics() == {"train/share": 1.0}


def test_metrics_of_an_evaluation_are_those_of_all_its_examples():
    def with_f1(model: Any, rng_key: Any, batch: Any) -> Any:
        return {"f1": F1()(model(batch["x"]), batch["y"])}

    calls = Calls(4)
    model, _ = trained(n_steps=4, hooks=[calls], fns=(train_step, with_f1), n_eval_batches=6)
    model.eval()
    pairs = [(model(batch["x"]).argmax(-1), batch["y"]) for batch in data().epoch(1)]
    predicted, labels = map(np.concatenate, zip(*pairs, strict=True))
    assert calls.metrics[4]["val/f1"] == f1_score(labels, predicted, average="macro")
