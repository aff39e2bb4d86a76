"""L-BFGS and schedule-free optimizers: what they need of a step, and the weights that evaluation uses."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from flax import nnx
from optax import contrib

from jax_trainer import TrainerModule, evaluate, fit
from jax_trainer.adapters import function_program
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.core import TrainState, compile_program, with_ema
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.core.state import averages_in
from jax_trainer.datasets import ArrayLoader
from jax_trainer.logger import LoggerConfig
from jax_trainer.optimizer import (
    LBFGS,
    GroupConfig,
    LBFGSConfig,
    LinearScheduleConfig,
    ScheduleFreeAdamW,
    ScheduleFreeAdamWConfig,
    ScheduleFreeSGD,
    ScheduleFreeSGDConfig,
    learning_rate,
)
from jax_trainer.sharding import Layout, Partitioning, make_mesh
from jax_trainer.styles import EvalLoop, EvalTask, TrainLoop, TrainTask
from jax_trainer.testing import assert_close, assert_same_bits

rng = np.random.default_rng(0)
X = (rng.normal(size=(32, 4)) * [1, 3, 0.3, 1]).astype(np.float32)
Y = (X @ [1.0, -0.5, 2.0, 0.0] + 0.5 * rng.normal(size=32) > 0).astype(np.float32)
BATCH = (X, Y)


def init(key: jax.Array, batch: Any) -> Any:
    return {"kernel": jnp.zeros(4), "bias": jnp.zeros(())}


def logistic(params: Any, batch: Any, *, rng: Any = None, train: bool = True) -> jax.Array:
    x, y = batch
    logits = x @ params["kernel"] + params["bias"]
    return optax.sigmoid_binary_cross_entropy(logits, y).mean() + 1e-2 * (params["kernel"] ** 2).sum()


def trained(tx: optax.GradientTransformation, steps: int, **options: Any) -> tuple[TrainState, list[float]]:
    program = function_program(init, logistic, tx, **options)
    state, step, losses = program.init(jax.random.key(0), BATCH), jax.jit(program.train_step), []
    for _ in range(steps):
        state, report = step(state, BATCH)
        losses.append(float(report.metrics.by_name["loss"].value))
    return state, losses


# L-BFGS


def test_lbfgs_reaches_the_optimum_of_scipy_in_a_few_steps():
    state, losses = trained(LBFGS(LBFGSConfig()).build(), 15)
    x, signs = np.append(X.astype(np.float64), np.ones((len(X), 1)), axis=1), 2 * Y.astype(np.float64) - 1
    loss = lambda w: np.logaddexp(0, -signs * (x @ w)).mean() + 1e-2 * (w[:4] ** 2).sum()
    found = scipy.optimize.minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-7})
    assert losses[-1] == pytest.approx(found.fun, rel=1e-6)
    assert_close(np.append(state.params["kernel"], state.params["bias"]), found.x, rtol=1e-3)
    assert losses == sorted(losses, reverse=True)  # a line search never goes up


class Logistic(TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return optax.sigmoid_binary_cross_entropy(model(batch[0])[:, 0], batch[1]).mean(), {}


def model() -> nnx.Linear:
    return nnx.Linear(4, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))


def trainer(folder: Any, optimizer: Any, **settings: Any) -> Logistic:
    options: dict[str, Any] = {"enable_progress_bar": False, "logger": LoggerConfig(log_dir=str(folder)), **settings}
    return Logistic(model=model(), optimizer=optimizer, exmp_input=(X[:8], Y[:8]), train_epochs=1, **options)


@pytest.mark.parametrize(
    ("size", "settings", "warns"),
    [
        (8, {}, True),
        pytest.param(32, {}, False, marks=pytest.mark.slow),
        (8, {"overfit_batches": 1}, False),
    ],
)
def test_lbfgs_on_several_batches_logs_a_warning(tmp_path, caplog, size, settings, warns):
    caplog.set_level(logging.WARNING, "jax_trainer")
    tx = optax.lbfgs(0.1, linesearch=None)  # a smaller program
    trainer(tmp_path, tx, **settings).train_model(ArrayLoader(BATCH, size))
    assert ("an epoch has 4 batches" in caplog.text) == warns


# schedule-free


FREE = {
    "a configuration": lambda: ScheduleFreeSGD(ScheduleFreeSGDConfig(learning_rate=0.5)).build(),
    "adam": lambda: ScheduleFreeAdamW(ScheduleFreeAdamWConfig(learning_rate=0.1)).build(),
    "an object": lambda: contrib.schedule_free_sgd(0.5),
    "frozen": lambda: ScheduleFreeSGD(ScheduleFreeSGDConfig(learning_rate=0.5, freeze="bias")).build(),
    "groups": lambda: ScheduleFreeSGD(
        ScheduleFreeSGDConfig(learning_rate=0.5, groups={"bias": GroupConfig("bias", learning_rate=0.1)})
    ).build(),
    "several": lambda: Optimizers({"kernel": contrib.schedule_free_sgd(0.5), "bias": optax.sgd(0.5)}),
}


def by_hand(opt_state: Any, params: Any) -> Any:
    """The weights of evaluation: those of every schedule-free state, for the parameters that it has."""
    is_free = lambda node: isinstance(node, contrib.ScheduleFreeState)
    found = dict(params)
    for node in [node for node in jax.tree.leaves(opt_state, is_leaf=is_free) if is_free(node)]:
        for name in params:
            if not isinstance(node.z[name], optax.MaskedNode):
                found[name] = contrib.schedule_free_eval_params(node._replace(z=node.z[name]), params[name])
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("groups", "several") else pytest.mark.slow) for name in FREE]
)
def test_evaluation_and_prediction_use_the_average_of_a_schedule_free_optimizer(name):
    tx = FREE[name]()
    losses = logistic
    if name == "several":
        losses: Any = lambda params, batch, *, rng, train: dict.fromkeys(("kernel", "bias"), logistic(params, batch))
    program = function_program(init, losses, tx)._replace(predict_step=lambda state, batch: state.params)
    compiled = compile_program(program, donate=False)
    state = compiled.init(jax.random.key(0), BATCH)
    for _ in range(4):
        state, *_ = compiled.train_step(state, compiled.train_buffer(state, BATCH, 1), BATCH)
    expected = by_hand(state.opt_state, state.params)
    assert_close(state.extra["schedule_free"], expected, rtol=1e-5)
    assert not np.allclose(expected["kernel"], state.params["kernel"])
    assert_same_bits(compiled.predict(state, BATCH), state.extra["schedule_free"])
    found = evaluate(compiled, state, {"val": [BATCH]})["val"]["loss"]
    assert found == pytest.approx(float(logistic(expected, BATCH)) * (2 if name == "several" else 1), rel=1e-5)


def test_the_best_weights_of_a_schedule_free_run_are_averages_in_memory_on_disk_and_when_loaded(tmp_path):
    config = ScheduleFreeSGDConfig(learning_rate=LinearScheduleConfig(init_value=4.0, end_value=0.1))
    saver = {"ModelCheckpoint": ModelCheckpointConfig(monitor="val/loss", keep_latest=1)}
    made: Any = trainer(tmp_path, config, callbacks=saver)
    results: Any = made.train_model(ArrayLoader(BATCH, 8), ArrayLoader(BATCH, 32), num_epochs=4)
    best = results.best.metrics["val/loss"]
    assert made.eval_model(ArrayLoader(BATCH, 32))["val/loss"] == pytest.approx(best, rel=1e-6)
    loss = lambda net: float(optax.sigmoid_binary_cross_entropy(net(X)[:, 0], Y).mean())
    assert loss(made.bind_model()) == pytest.approx(best, rel=1e-5)
    assert loss(made.bind_model(which="last")) == pytest.approx(results[4]["val/loss"], rel=1e-5)
    loaded = Logistic.load_from_checkpoint(made.folder.path, (X[:8], Y[:8]), model=model())
    assert loss(loaded.bind_model()) == pytest.approx(best, rel=1e-5)
    assert loaded.eval_model(ArrayLoader(BATCH, 32))["val/loss"] == pytest.approx(best, rel=1e-6)


def test_fit_leaves_the_average_in_the_module_and_a_loop_evaluates_it(tmp_path):
    net: Any = model()
    loss_fn = lambda logits, labels: optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()
    options: dict[str, Any] = {"tensorboard": False, "progress": False, "log_dir": str(tmp_path)}
    tx = contrib.schedule_free_sgd(1.0)
    result = fit(net, BATCH, BATCH, loss_fn=loss_fn, optimizer=tx, num_epochs=3, batch_size=16, save=False, **options)
    assert float(loss_fn(net(X), Y)) == pytest.approx(result.history[3]["val/loss"], rel=1e-5)
    apply: Any = lambda variables, x: x @ variables["params"]["kernel"][:, None] + variables["params"]["bias"]
    start: Any = lambda rngs, x: {"params": init(None, None)}  # type: ignore[arg-type]
    task = TrainTask(apply=apply, optimizer=tx, loss=loss_fn, data=[BATCH])
    (last,) = TrainLoop(start, task, n_steps=4, n_steps_per_checkpoint=4, stdout=False)
    average = averages_in(last.optimizer_state, last.model_params)["schedule_free"]
    found = EvalLoop(EvalTask(apply=apply, metrics={"loss": loss_fn}, data=[BATCH]))(last).metrics["eval"]["loss"]
    assert found == pytest.approx(float(loss_fn(apply({"params": average}, X), Y)), rel=1e-5)


def test_a_schedule_free_optimizer_and_an_average_are_an_error(tmp_path):
    program = with_ema(function_program(init, logistic, contrib.schedule_free_sgd(0.5)), 0.9)
    with pytest.raises(ValueError, match="`ema`"):
        program.init(jax.random.key(0), BATCH)


def test_the_recorded_rate_of_a_schedule_free_optimizer_is_that_of_its_warmup():
    config = ScheduleFreeSGDConfig(learning_rate=LinearScheduleConfig(init_value=0.0, end_value=1.0))
    state, _ = trained(ScheduleFreeSGD(config).build(4), 3)
    assert float(learning_rate(state.opt_state)) == 0.5


def test_the_average_is_sharded_like_the_parameters():
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    layout = Layout(mesh=mesh, param_spec=Partitioning(smallest=1))
    compiled = compile_program(function_program(init, logistic, contrib.schedule_free_sgd(0.5)), layout=layout)
    state = compiled.init(jax.random.key(0), BATCH)
    assert tuple(state.extra["schedule_free"]["kernel"].sharding.spec) == ("fsdp",)
