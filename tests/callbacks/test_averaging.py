"""Stochastic weight averaging: the mean of the weights of the last epochs, with BatchNorm statistics of its own."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import ArrayLoader, LambdaCallback, fit, testing
from jax_trainer.callbacks import LearningRateMonitor, StochasticWeightAveraging
from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import AdamWConfig, CosineScheduleConfig
from jax_trainer.testing import assert_close, assert_same_bits
from tests.rows import noted_row

EPOCHS, SIZE, EXAMPLES = 5, 16, 48
X = np.random.default_rng(0).normal(size=(EXAMPLES, 4), loc=1.0).astype(np.float32)
Y = (X[:, 0] > 1).astype(np.int32)


class LinenNet(nn.Module):
    momentum: float = 0.9
    frozen: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train or self.frozen, momentum=self.momentum)(nn.Dense(3)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum)(nn.Dense(3)(nn.relu(x)))
        return nn.Dense(2)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, momentum: float = 0.9) -> None:
        self.first, self.second, self.out = (nnx.Linear(n, m, rngs=rngs) for n, m in ((4, 3), (3, 3), (3, 2)))
        self.norm, self.other = (nnx.BatchNorm(3, momentum=momentum, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.other(self.second(nnx.relu(self.norm(self.first(x))))))


def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return testing.cross_entropy(logits, labels).mean()


def loader() -> ArrayLoader:
    return ArrayLoader((X, Y), SIZE, shuffle=True, seed=3)


def trained(folder: Path, model: Any, *callbacks: Any, optimizer: Any = None, **options: Any) -> Any:
    shared: dict[str, Any] = {"log_dir": str(folder), "tensorboard": False, "progress": False, "loss_fn": loss}
    shared |= {"optimizer": optimizer or optax.sgd(0.1, momentum=0.9), "num_epochs": EPOCHS, "callbacks": callbacks}
    shared |= {"test_ds": ArrayLoader((X, Y), SIZE), **options}
    return fit(model, loader(), **shared)


class Weights(LambdaCallback):
    """The weights at the end of each epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        super().__init__(on_training_epoch_end=self.note)

    def note(self, epoch: int) -> None:
        self.seen.append(jax.tree.map(np.asarray, self.state.params))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without averaging, with its weights of each epoch, and runs with it; each done once."""
    folder, weights = tmp_path_factory.mktemp("runs"), Weights()
    plain = trained(folder, LinenNet(), weights)

    @cache
    def averaged(start: int | float) -> Any:
        return trained(folder, LinenNet(), StochasticWeightAveraging(swa_epoch_start=start))

    return SimpleNamespace(plain=plain, weights=weights.seen, averaged=averaged)


def mean(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.mean(leaves, 0), *trees)


def test_the_last_weights_are_the_mean_of_those_of_the_last_epochs(runs):
    for start, first in [(3, 3), (0.8, 4)]:
        with noted_row(start, first):
            expected = mean(runs.weights[first - 1 :])
            assert_close(runs.averaged(start).state.params, expected, rtol=1e-4, atol=1e-6)


def by_hand(apply: Any) -> Any:
    """The mean over batches of the statistics that a model without memory has after each."""
    compiled = jax.jit(apply)
    return mean([compiled(x) for x, _ in loader().epoch(1)])


def test_batchnorm_statistics_are_those_of_the_average_over_the_training_data_in_linen(runs):
    state = runs.averaged(3).state

    def apply(x: Any) -> Any:
        variables = {"params": state.params, "batch_stats": jax.tree.map(jnp.zeros_like, state.batch_stats)}
        return LinenNet(momentum=0.0).apply(variables, x, train=True, mutable=["batch_stats"])[1]["batch_stats"]  # type: ignore[index]

    assert_close(state.batch_stats, by_hand(apply), rtol=1e-4, atol=1e-5)


def test_the_weights_of_nnx_are_averaged_as_well(tmp_path):
    result = trained(tmp_path, NnxNet(nnx.Rngs(0)), StochasticWeightAveraging(swa_epoch_start=3))
    state = result.state

    def apply(x: Any) -> Any:
        model = NnxNet(nnx.Rngs(0), momentum=0.0)
        nnx.update(model, nnx.State(jax.tree.map(jnp.copy, state.params)))
        model.train()
        model(x)
        return nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    assert_close(state.model_state, by_hand(apply), rtol=1e-4, atol=1e-5)


def test_statistics_that_training_does_not_update_stay_and_others_see_them(tmp_path):
    state = trained(tmp_path, LinenNet(frozen=True), StochasticWeightAveraging(swa_epoch_start=3)).state
    first, second = (state.batch_stats[f"BatchNorm_{index}"] for index in range(2))
    assert_same_bits(first, {"mean": jnp.zeros(3), "var": jnp.ones(3)})

    def apply(x: Any) -> Any:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        model = LinenNet(momentum=0.0, frozen=True)
        return model.apply(variables, x, train=True, mutable=["batch_stats"])[1]["batch_stats"]["BatchNorm_1"]  # type: ignore[index]

    assert_close(second, by_hand(apply), rtol=1e-4, atol=1e-5)


def test_evaluations_use_the_weights_of_the_optimizer_and_the_last_one_the_average(runs):
    result = runs.averaged(3)
    losses = [[one.history[epoch]["val/loss"] for epoch in range(1, EPOCHS + 1)] for one in (runs.plain, result)]
    assert losses[0][:-1] == losses[1][:-1] and losses[0][-1] != losses[1][-1]
    assert result.evaluate((X, Y), which="last")["test/loss"] == pytest.approx(losses[1][-1], rel=1e-4)


# the learning rate


def rates_of_torch(start: int, base: Any, rate: float, epochs: int, strategy: str) -> list[float]:
    """The learning rate in each epoch, with the schedule of torch from the first averaged epoch on."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base(start))
    strategies: dict[str, Any] = {"anneal_epochs": epochs, "anneal_strategy": strategy}
    schedule, found = torch.optim.swa_utils.SWALR(optimizer, rate, **strategies), []
    for _ in range(start, EPOCHS + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [base(epoch) for epoch in range(1, start)] + found


@pytest.mark.parametrize(
    ("epochs", "strategy"), [(2, "cos"), pytest.param(3, "linear", marks=pytest.mark.slow), (0, "cos")]
)
def test_the_learning_rate_anneals_as_that_of_torch(tmp_path, epochs, strategy):
    start, rate = 3, 0.05
    averaging = StochasticWeightAveraging(
        swa_epoch_start=start, swa_lrs=rate, annealing_epochs=epochs, annealing_strategy=strategy
    )
    seen = rates_with(tmp_path, averaging, optax.inject_hyperparams(optax.sgd)(learning_rate=0.4))
    expected = rates_of_torch(start, lambda epoch: 0.4, rate, epochs, strategy)
    if epochs == 0:  # here at once, in the first of them
        expected[start - 1] = rate
    assert seen == pytest.approx(expected, rel=1e-5)


def test_the_rate_replaces_that_of_a_schedule_in_the_update_and_in_the_log(tmp_path):
    schedule = AdamWConfig(learning_rate=CosineScheduleConfig(init_value=0.1))
    averaging = StochasticWeightAveraging(swa_epoch_start=3, swa_lrs=0.02, annealing_epochs=0)
    assert rates_with(tmp_path, averaging, schedule)[2:] == pytest.approx([0.02] * 3, rel=1e-5)


def rates_with(folder: Path, averaging: Any, optimizer: Any) -> list[float]:
    seen: list[float] = []
    note = LambdaCallback(on_training_epoch_end=lambda train_metrics: seen.append(float(train_metrics["optimizer/lr"])))
    trained(folder, nn.Dense(2), averaging, note, LearningRateMonitor(), optimizer=optimizer)
    return seen


# mistakes


@pytest.mark.parametrize(
    ("averaging", "options", "named"),
    [
        ({"swa_epoch_start": EPOCHS + 1}, {}, f"swa_epoch_start.*{EPOCHS + 1}.*{EPOCHS}"),
        ({}, {"ema": 0.9}, "`ema`"),
        ({"swa_lrs": 0.1}, {}, "swa_lrs.*0.1.*inject_hyperparams"),
    ],
)
def test_what_cannot_be_averaged_is_refused_before_the_first_step(tmp_path, averaging, options, named):
    with pytest.raises(ValueError, match=named):
        trained(tmp_path, nn.Dense(2), StochasticWeightAveraging(**averaging), **options)


def test_settings_that_make_no_sense_are_refused():
    for options in [{"swa_epoch_start": 0}, {"swa_epoch_start": 1.5}, {"swa_lrs": 0.0}, {"annealing_strategy": "step"}]:
        with noted_row(options):
            ((name, value),) = options.items()
            with pytest.raises(SettingsError, match=f"{name}.*{value}"):
                StochasticWeightAveraging(**options)


def test_data_that_can_be_used_once_leaves_the_statistics_with_a_warning(tmp_path, caplog):
    batches = (batch for epoch in range(1, EPOCHS + 1) for batch in loader().epoch(epoch))
    averaging = StochasticWeightAveraging(swa_epoch_start=3)
    options: dict[str, Any] = {"tensorboard": False, "progress": False, "steps_per_epoch": 2, "num_epochs": EPOCHS}
    optimizer = optax.sgd(0.1, momentum=0.9)
    fit(LinenNet(), batches, loss_fn=loss, optimizer=optimizer, callbacks=[averaging], log_dir=str(tmp_path), **options)
    assert "BatchNorm statistics are not those of the averaged weights" in caplog.text
