"""An evaluation measures the model of a checkpoint, over all examples, and changes nothing."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.datasets import ArrayLoader, DataError, SupervisedBatch
from jax_trainer.metrics import R2
from jax_trainer.styles.checkpoints import Checkpoint
from jax_trainer.styles.loop_tasks import EvalTask
from jax_trainer.styles.looping import EvalLoop

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 3)).astype(np.float32), RNG.normal(size=10).astype(np.float32)
WEIGHTS = np.array([1.0, -1.0, 0.5], np.float32)
ERRORS = np.abs(X @ WEIGHTS - Y)


def line(variables: dict[str, Any], x: jax.Array) -> jax.Array:
    return x @ variables["params"]


def distance(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.abs(outputs - targets).mean()


def checkpoint(params: Any = WEIGHTS, model_state: Any = None) -> Checkpoint:
    return Checkpoint(params, model_state or {}, (), params, 1.0, 2, 0.5, 4)


def eval_loop(data: Any, n_steps: int = 3, **options: Any) -> EvalLoop:
    return EvalLoop(EvalTask(apply=line, metrics={"distance": distance}, data=data), n_steps=n_steps, **options)


def loader() -> ArrayLoader:
    return ArrayLoader((X, Y), 4, shuffle=False)  # the last batch has two examples


def test_metrics_are_means_over_all_examples_also_where_the_last_batch_is_smaller():
    summary = eval_loop(loader())(checkpoint())
    assert summary.metrics["eval"] == {"distance": pytest.approx(ERRORS.mean(), rel=1e-5)}
    assert list(summary.metrics) == ["train", "eval"]
    assert summary.metrics["train"]["seconds_per_step"] == 0.25
    assert (summary.step, summary.loss) == (4, 1.0)


def test_a_metric_of_every_example_is_averaged():
    task = EvalTask(line, {"each": lambda outputs, targets: jnp.abs(outputs - targets)}, loader())
    assert EvalLoop(task, n_steps=3)(checkpoint()).metrics["eval"]["each"] == pytest.approx(ERRORS.mean(), rel=1e-5)


def test_a_sum_with_a_count_is_the_mean_over_all_that_is_counted():
    def near(outputs, targets):
        errors = jnp.abs(outputs - targets)
        return {"value": jnp.where(errors < 1, errors, 0).sum(), "count": (errors < 1).sum()}

    found = EvalLoop(EvalTask(line, {"near": near}, loader()), n_steps=3)(checkpoint()).metrics["eval"]["near"]
    assert found == pytest.approx(ERRORS[ERRORS < 1].mean(), rel=1e-5)


def test_only_so_many_batches_are_looked_at():
    found = eval_loop(loader(), n_steps=1)(checkpoint()).metrics["eval"]["distance"]
    assert found == pytest.approx(ERRORS[:4].mean(), rel=1e-5)


def test_an_iterator_continues_where_the_previous_evaluation_stopped():
    evaluate = eval_loop(((X[i : i + 1], Y[i : i + 1]) for i in itertools.count()), n_steps=2)
    found = [evaluate(checkpoint()).metrics["eval"]["distance"] for _ in range(3)]
    assert found == pytest.approx([ERRORS[:2].mean(), ERRORS[2:4].mean(), ERRORS[4:6].mean()], rel=1e-5)


def test_an_iterator_that_is_used_up_is_an_error():
    evaluate = eval_loop(iter([(X, Y)]))
    evaluate(checkpoint())
    with pytest.raises(DataError, match="'eval'.*once"):
        evaluate(checkpoint())


def test_data_without_a_batch_is_an_error():
    with pytest.raises(DataError, match="'eval'.*no batch"):
        eval_loop(lambda: iter([]))(checkpoint())
    with pytest.raises(DataError, match="empty"):
        eval_loop([])


def test_evaluations_can_be_chained_in_groups_of_their_own():
    summary = eval_loop(loader(), group="more")(eval_loop(loader(), n_steps=1)(checkpoint()))
    assert list(summary.metrics) == ["train", "eval", "more"]
    assert summary.metrics["more"] != summary.metrics["eval"]


def centred(variables: Any, x: jax.Array, train: bool, rngs: dict[str, jax.Array]) -> jax.Array:
    """Uses what it has learnt about its inputs, except in training; noisy if it gets a key."""
    noise = sum(jax.random.normal(key) for key in rngs.values())
    return line(variables, x - (jnp.nan if train else variables["means"])) + noise


def test_the_model_is_in_evaluation_mode_and_has_its_own_state_and_randomness():
    task = EvalTask(centred, {"distance": distance}, [(X, Y)])
    evaluate, other = (EvalLoop(task, rnkey=jax.random.key(seed)) for seed in (3, 4))
    given = checkpoint(model_state={"means": X.mean(0)})
    found = [loop(given).metrics["eval"]["distance"] for loop in (evaluate, evaluate, other)]
    assert found[0] == found[1]
    assert found[0] != found[2]
    without_noise = EvalLoop(task, collections={"apply": []})(given).metrics["eval"]["distance"]
    assert without_noise == pytest.approx(np.abs((X - X.mean(0)) @ WEIGHTS - Y).mean(), rel=1e-5)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        EvalLoop(EvalTask(line, {}, loader()))
    with pytest.raises(ValueError, match="eval_batches"):
        eval_loop(loader(), n_steps=0)


# metrics and masks


def masked(weights: Any) -> list[SupervisedBatch]:
    return [SupervisedBatch.of(X[rows], Y[rows], weights[rows]) for rows in (slice(4), slice(4, 8), slice(8, 10))]


def test_metric_objects_and_values_per_example_respect_the_mask_of_a_batch():
    weights = np.linspace(0, 1, 10, dtype=np.float32)
    metrics = {"r2": R2(), "each": lambda outputs, targets: jnp.abs(outputs - targets)}
    found = EvalLoop(EvalTask(line, metrics, masked(weights)), n_steps=3)(checkpoint()).metrics["eval"]
    assert found["each"] == pytest.approx(np.average(ERRORS, weights=weights), rel=1e-5)
    spread = np.average((Y - np.average(Y, weights=weights)) ** 2, weights=weights)
    assert found["r2"] == pytest.approx(1 - np.average(ERRORS**2, weights=weights) / spread, rel=1e-5)


def test_a_reduced_metric_of_a_masked_batch_is_refused():
    with pytest.raises(ValueError, match=r"`mask` of shape \(4,\).*'distance'"):
        eval_loop(masked(np.ones(10, bool)))(checkpoint())
