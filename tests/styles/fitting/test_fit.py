"""`fit` with a real tiny classifier: what comes out, what is written, and that nothing around it changes a bit."""

import json
import os
import signal
import sys
import traceback
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import linen as nn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[attr-defined] - made when it is imported

from jax_trainer.adapters import function_program
from jax_trainer.callbacks import (
    Callback,
    CallbackConfig,
    EarlyStoppingConfig,
    LambdaCallback,
    ModelCheckpointConfig,
    ProgressBar,
)
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import FlaxState, NonFiniteError, TrainState, copy_state
from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.engine import StepEnd, StepMetrics, StopTraining
from jax_trainer.runs import OtherRunError
from jax_trainer.sharding import Layout, LayoutError, Partitioning, make_mesh
from jax_trainer.styles.fitting import fit
from jax_trainer.styles.learning_rate import lr_schedule
from jax_trainer.testing import TinyLinen, assert_same_bits
from tests.styles.style_runs import variables_of

SIZE, STEPS, EPOCHS = 8, 4, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(SIZE * STEPS, 8)).astype(np.float32), RNG.integers(4, size=SIZE * STEPS)
XV, YV = RNG.normal(size=(19, 8)).astype(np.float32), RNG.integers(4, size=19)  # the last batch has 3
MODEL = TinyLinen()
VARIABLES = variables_of(MODEL, X[:1])
TX = optax.inject_hyperparams(optax.sgd)(lr_schedule(0.05, STEPS, EPOCHS, 1))
QUIET: dict[str, Any] = {"progress": False, "tensorboard": False}


def state_of(tx=TX):
    return TrainState.create(apply_fn=MODEL.apply, **VARIABLES, tx=tx, rng=jax.random.key(3))


@jax.jit
def loss_fn(logits, labels):
    loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 4)).mean()
    return loss, {"loss": loss, "spread": logits.std()}


@jax.jit
def eval_step(state: FlaxState, batch):
    x, y = batch
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return jnp.equal(state.apply_fn(variables, x, train=False).argmax(-1), y).mean()


def fitted(folder, train=(X, Y), test=(XV, YV), state=None, **options):
    usual = {"loss_fn": loss_fn, "eval_step": eval_step, "num_epochs": EPOCHS, "batch_size": SIZE, "log_dir": folder}
    return fit(state_of() if state is None else state, train, test, **{**usual, **QUIET, **options})


@jax.jit
def logits_of(variables):
    return MODEL.apply(variables, XV)


def predict(state) -> Any:
    return logits_of({"params": state.params, **state.model_state})


def rows_of(result):
    """The numbers of its record, without those of the clock."""
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [line for line in lines if "hparams" not in line]
    return [
        {name: value for name, value in line.items() if "time" not in name and "throughput" not in name}
        for line in numbers
    ]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A complete training with all outputs enabled."""
    hparams = {"batch_size": SIZE, "lr": 0.05, "layers": [16, 4], "api_key": "hunter2"}
    folder = tmp_path_factory.mktemp("done")
    return fitted(folder, tensorboard=True, progress=True, log_name="tiny", hparams=hparams)


def test_every_epoch_is_in_the_history_with_training_and_evaluation(done):
    assert list(done.history) == [1, 2, 3]
    for metrics in done.history.values():
        assert {"train/loss", "train/spread", "val/loss", "val/spread", "val/accuracy"} <= set(metrics)
    assert done.history[3]["train/loss"] < done.history[1]["train/loss"]
    assert done.status == "completed"
    assert int(done.state.step) == EPOCHS * STEPS


def test_a_smaller_last_batch_counts_for_its_examples_only(done):
    logits = np.asarray(predict(done.state), np.float64)
    assert done.history[3]["val/accuracy"] == pytest.approx(float((logits.argmax(-1) == YV).mean()), abs=1e-6)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(YV)), YV]
    assert done.history[3]["val/loss"] == pytest.approx(losses.mean(), rel=1e-6)


@pytest.mark.parametrize("mesh", [None, pytest.param({"fsdp": 4}, marks=pytest.mark.slow)])
def test_it_matches_a_hand_written_loop_on_one_device_or_many(tmp_path, mesh):
    model: Any = nn.Dense(4, kernel_init=nn.initializers.zeros)
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    loss = optax.softmax_cross_entropy_with_integer_labels
    options = {"loss_fn": loss, "eval_step": None, "num_epochs": 2, "mesh": mesh}
    result = fitted(tmp_path, ArrayLoader((X, Y), SIZE), None, state, **options)
    assert len(result.state.params["kernel"].sharding.device_set) == (8 if mesh else 1)
    gradient = jax.jit(jax.grad(lambda p, x, y: loss(model.apply({"params": p}, x), y).mean()))
    for x, y in 2 * batches():
        params = jax.tree.map(lambda p, g: np.asarray(p) - np.float32(0.1) * g, params, gradient(params, x, y))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), result.state.params, params)


def test_the_state_that_is_handed_in_stays_as_it_is(tmp_path):
    state = state_of()
    before = copy_state(state)
    fitted(tmp_path, state=state, num_epochs=1)
    assert_same_bits(state, before)


def test_a_trained_state_can_be_trained_on(done, tmp_path):
    further = fitted(tmp_path, state=done.state, num_epochs=1)
    assert int(further.state.step) == (EPOCHS + 1) * STEPS
    assert jax.tree.structure(further.state) == jax.tree.structure(state_of())


# what is written


def test_the_folder_has_the_configuration_without_secrets(done):
    stored = yaml.safe_load((done.folder / "config.yaml").read_text())
    assert stored["model"] == "TinyLinen"
    assert (stored["num_epochs"], stored["seed"], stored["metric"]) == (EPOCHS, 0, "val/accuracy")
    assert stored["hparams"] == {"batch_size": SIZE, "lr": 0.05, "layers": [16, 4], "api_key": "<hidden>"}
    assert done.folder.parent.name == "tiny"
    assert "Run completed" in (done.folder / "run.log").read_text()
    written = b"".join(path.read_bytes() for path in done.folder.rglob("*") if path.is_file())
    assert b"hunter2" not in written


def test_tensorboard_reads_the_curves_and_the_hyperparameters(done):
    reader = EventAccumulator(str(done.folder))
    reader.Reload()
    shown = {event.step: event.value for event in reader.Scalars("val/accuracy")}
    expected = {epoch * STEPS: metrics["val/accuracy"] for epoch, metrics in done.history.items()}
    assert shown == pytest.approx(expected, rel=1e-6)
    content = reader.PluginTagToContent("hparams")
    params = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert params["lr"].number_value == 0.05
    assert params["batch_size"].number_value == SIZE
    assert params["api_key"].string_value == "<hidden>"
    metrics = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment.metric_infos
    assert {"hparam/val/accuracy", "hparam/best/val/accuracy"} <= {metric.name.tag for metric in metrics}
    [best] = reader.Scalars("hparam/best/val/accuracy")
    assert best.value == pytest.approx(done.best.metrics["val/accuracy"], rel=1e-6)


def test_the_learning_rate_is_reported_by_the_steps_themselves(done):
    schedule: Any = lr_schedule(0.05, STEPS, EPOCHS, 1)
    for epoch, metrics in done.history.items():  # the last update of an epoch
        assert metrics["optimizer/lr"] == pytest.approx(float(schedule(epoch * STEPS - 1)), rel=1e-6)


def test_the_bar_shows_loss_and_learning_rate(tmp_path, capsys):
    fitted(tmp_path, num_epochs=1, progress=True)
    first, compiling, epoch, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("Run folder: ") and "compiling" in compiling
    assert "loss " in epoch
    assert "lr 0.03" in epoch  # three quarters of the way from 0.005 to 0.05


def test_the_bar_gets_the_metric_that_selects_the_best_or_the_chosen_one(tmp_path, monkeypatch):
    metrics = []

    class Bar(ProgressBar):
        def __init__(self, **options: Any) -> None:
            metrics.append(options["metric"])
            super().__init__(**options)

    monkeypatch.setattr("jax_trainer.runs.run.ProgressBar", Bar)
    for options in ({}, {"metric": "loss"}, {"save": False}, {"progress_metric": "train/loss"}):
        fitted(tmp_path, num_epochs=1, progress=True, **options)
    assert metrics == ["val/accuracy", "val/loss", "val/accuracy", "train/loss"]


def test_a_progress_metric_that_is_not_reported_is_refused(tmp_path):
    with pytest.raises(ValueError, match="progress_metric.*'val/acc'.*val/accuracy, val/loss.*val/accuracy"):
        fitted(tmp_path, progress_metric="val/acc")
    assert not any(tmp_path.iterdir())


class Watcher(Callback):
    """Collects the metrics of steps as they arrive."""

    config: CallbackConfig

    def __init__(self) -> None:
        super().__init__(CallbackConfig())
        self.steps, self.rates = 0, []

    def handle(self, event) -> None:
        self.steps += isinstance(event, StepEnd)
        if isinstance(event, StepMetrics):
            self.rates.append(event.rows.columns["optimizer/lr"].values)
        super().handle(event)


def test_loss_and_rate_arrive_many_steps_at_a_time(tmp_path):
    program = function_program(
        lambda key, batch: jnp.zeros(8),
        lambda params, batch, *, rng, train: ((batch - params) ** 2).mean(),
        optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 480)),
    )
    watcher = Watcher()
    data = ArrayLoader(np.ones((480, 8), np.float32), 1)
    fit(program, data, num_epochs=1, log_dir=tmp_path, callbacks=[watcher], tensorboard=False)
    assert watcher.steps == 480
    assert len(watcher.rates) <= 24  # reads from the device
    np.testing.assert_allclose(np.concatenate(watcher.rates), 0.1 * (1 - np.arange(480) / 480), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_without_a_rate_in_the_optimizers_state_none_is_shown(tmp_path, capsys):
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(lr_schedule(0.05, STEPS, EPOCHS, 1)))
    result = fitted(tmp_path, state=state_of(chain), num_epochs=1, progress=True)
    assert "optimizer/lr" not in result.history[1]
    assert "lr " not in capsys.readouterr().err


# the best checkpoint


@pytest.mark.parametrize(
    ("metric", "best"), [("val/accuracy", max), ("loss", min), pytest.param("spread", min, marks=pytest.mark.slow)]
)
def test_the_best_checkpoint_is_that_of_the_metric(done, tmp_path, metric, best):
    fit_option = {"metric": metric, **({"mode": "min"} if metric == "spread" else {})}
    result: Any = done if metric == "val/accuracy" else fitted(tmp_path, **fit_option)
    full = metric if "/" in metric else f"val/{metric}"
    values = {epoch: metrics[full] for epoch, metrics in result.history.items()}
    assert result.best.metrics[full] == best(values.values())
    assert values[result.best.epoch] == best(values.values())
    assert result.best.step == result.best.epoch * STEPS
    state = result.best_state()
    logits = predict(state)
    hits = logits.argmax(-1) == YV
    assert result.history[result.best.epoch]["val/accuracy"] == pytest.approx(float(hits.mean()), abs=1e-6)


def test_without_evaluation_the_training_loss_decides(tmp_path):
    result = fitted(tmp_path, test=None, eval_step=None)
    losses = {epoch: metrics["train/loss"] for epoch, metrics in result.history.items()}
    assert result.best is not None
    assert result.best.metrics["train/loss"] == min(losses.values())
    assert not [name for name in result.history[1] if name.startswith("val/")]


def test_an_unknown_metric_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"`metric` is 'val/acc'.* val/accuracy, val/loss"):
        fitted(tmp_path / "runs", metric="val/acc")
    with pytest.raises(ValueError, match="`metric` is 'val/accuracy'.*`test_ds`"):
        fitted(tmp_path / "runs", test=None, eval_step=None, metric="val/accuracy")
    with pytest.raises(ValueError, match="'val/spread'.*`mode: min` or `mode: max`"):
        fitted(tmp_path / "runs", metric="spread")
    assert not (tmp_path / "runs").exists()


def test_evaluations_come_every_few_epochs_and_at_the_end(tmp_path):
    result = fitted(tmp_path, eval_freq=2)
    assert [epoch for epoch, metrics in result.history.items() if "val/loss" in metrics] == [2, 3]


# nothing around it changes a bit


def test_records_callbacks_and_evaluations_change_no_bit(done, tmp_path):
    bare = fitted(tmp_path / "bare", test=None, eval_step=None)
    assert_same_bits(bare.state, done.state)
    seen: list[int] = []
    watching = LambdaCallback(on_training_epoch_end=lambda metrics, epoch: seen.append(epoch))
    watched = fitted(tmp_path / "watched", callbacks=[watching], eval_freq=2)
    assert seen == [1, 2, 3]
    assert_same_bits(watched.state, done.state)


def torch_loader():
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(dataset, batch_size=SIZE)


def batches():
    return [(X[start : start + SIZE], Y[start : start + SIZE]) for start in range(0, len(X), SIZE)]


def grain_records():
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(SIZE).to_iter_dataset()


def endlessly():
    while True:
        yield from batches()


KINDS = {
    "torch": (torch_loader, {}),
    "grain": (grain_records, {}),
    "list": (batches, {}),
    "function": (lambda: lambda: iter(batches()), {}),
    "generator": (endlessly, {"steps_per_epoch": STEPS}),
    "chunks": (lambda: ArrayLoader((X, Y), SIZE), {"steps_per_call": "epoch", "resident": True}),
}


@pytest.fixture(scope="module")
def in_order(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("in_order"), ArrayLoader((X, Y), SIZE))


@pytest.mark.parametrize(
    "kind", [kind if kind == "generator" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_the_same_batches_give_the_same_bits_wherever_they_come_from(in_order, tmp_path, kind):
    make, options = KINDS[kind]
    result = fitted(tmp_path, make(), torch_test() if kind == "torch" else (XV, YV), **options)
    assert_same_bits(result.state, in_order.state)
    assert result.history == in_order.history


def torch_test():
    torch = pytest.importorskip("torch")
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(XV), torch.from_numpy(YV))
    return torch.utils.data.DataLoader(dataset, batch_size=SIZE)


def test_arrays_are_shuffled_by_the_seed(done, in_order, tmp_path):
    assert not np.array_equal(*(jax.tree.leaves(one.state.params)[0] for one in (done, in_order)))
    loader = ArrayLoader((X, Y), SIZE, shuffle=True, seed=0)
    assert_same_bits(fitted(tmp_path, loader).state, done.state)


# going on


class Interrupt(Callback):
    """Presses Ctrl-C after so many steps."""

    config: CallbackConfig

    def __init__(self, at: int) -> None:
        super().__init__(CallbackConfig())
        self.at = at

    def handle(self, event) -> None:
        if isinstance(event, StepEnd) and event.step == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        super().handle(event)


def test_the_screen_shows_why_fit_ended_and_where_it_resumes(tmp_path, capsys):
    stopping = EarlyStoppingConfig(monitor="val/loss", stopping_threshold=1e9)
    result = fitted(tmp_path, callbacks=[stopping], progress=True)
    assert (result.status, len(result.history)) == ("stopped", 1)
    assert result.reason.startswith(f"EarlyStopping after step {STEPS}: `val/loss` is ")
    assert result.reason in capsys.readouterr().err
    fitted(tmp_path, resume=str(result.folder), progress=True)
    assert f"Resumed from step {STEPS} (epoch 1)." in capsys.readouterr().err


def test_ctrl_c_leaves_a_valid_checkpoint_to_resume_from(done, tmp_path):
    with pytest.raises(KeyboardInterrupt) as end:
        fitted(tmp_path, callbacks=[Interrupt(STEPS + 1)])
    [folder] = (tmp_path / "fit").iterdir()
    assert f"step {STEPS + 1} " in str(end.value) and f"fit(…, resume={str(folder)!r})" in str(end.value)
    reached = end.value.result  # type: ignore[attr-defined]
    assert (reached.status, list(reached.history), int(reached.state.step)) == ("interrupted", [1], STEPS + 1)
    assert len(traceback.extract_tb(end.tb)) < 8  # not all of the library
    store = CheckpointStore(folder / "checkpoints")
    last = store.all()[-1]
    assert (last.step, store.verify(last.path)) == (STEPS + 1, "")
    assert "Run interrupted" in (folder / "run.log").read_text()
    result = fitted(tmp_path, resume=True)
    assert result.folder == folder
    assert_same_bits(result.state, done.state)
    assert (result.history, rows_of(result), result.best) == (done.history, rows_of(done), done.best)
    again = fitted(tmp_path, resume=folder)  # which is done
    assert (again.history, again.status) == (done.history, "completed")
    assert_same_bits(again.state, done.state)


def test_a_run_resumes_from_the_named_checkpoint(done, tmp_path):
    first = fitted(tmp_path, num_epochs=2)
    step = sorted((first.folder / "checkpoints").glob("step_*"))[0]
    result = fitted(tmp_path, resume=step)
    assert int(step.name.removeprefix("step_")) == STEPS
    assert_same_bits(result.state, done.state)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(OtherRunError, match=r"fit.*resume='auto'"):
        fitted(tmp_path, resume=True)
    assert not (tmp_path / "fit").exists()
    with pytest.raises(FileNotFoundError, match="not a run folder"):
        fitted(tmp_path, resume=tmp_path / "nowhere")


# ends before the end


def stop_early(metrics, epoch) -> None:
    raise StopTraining("enough")


def test_a_callback_may_stop_the_run(tmp_path):
    config = EarlyStoppingConfig(monitor="val/loss", patience=1, min_delta=100.0)
    result = fitted(tmp_path, callbacks=[config])
    assert (result.status, list(result.history)) == ("stopped", [1, 2])
    assert int(result.state.step) == 2 * STEPS


@pytest.mark.slow
def test_a_function_may_stop_the_run(tmp_path):
    result = fitted(tmp_path, callbacks={"mine": LambdaCallback(on_validation_epoch_end=stop_early)})
    assert (result.status, list(result.history)) == ("stopped", [1])


def spoilt():
    x = X.copy()
    x[SIZE + 1, 2] = np.nan
    return ArrayLoader((x, Y), SIZE)


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path):
    with pytest.raises(NonFiniteError, match=r"Step 2: the loss was nan"):
        fitted(tmp_path, spoilt())
    [folder] = (tmp_path / "fit").iterdir()
    assert not list((folder / "checkpoints").iterdir())
    assert "Run failed" in (folder / "run.log").read_text()


@pytest.mark.slow
def test_with_detection_what_was_not_finite_is_explained_and_its_batch_kept(tmp_path):
    with pytest.raises(NonFiniteError, match=r"Step 2: .*the batch") as caught:
        fitted(tmp_path, spoilt(), detect_nans=True)
    [folder] = (tmp_path / "fit").iterdir()
    assert (folder / "nonfinite" / "batch.npz").is_file()
    assert str(folder) in str(caught.value)


def test_metric_and_a_checkpoint_callback_cannot_both_select_the_best_state(tmp_path):
    with pytest.raises(ValueError, match="`metric` and a `ModelCheckpoint`"):
        fitted(tmp_path, metric="val/loss", callbacks=[ModelCheckpointConfig()])


def test_invalid_numbers_are_refused_by_name(tmp_path_factory, subtests):
    for wrong in [{"num_epochs": 0}, {"eval_freq": 0}, {"batch_size": 0}, {"num_epochs": 2.5}]:
        tmp_path = tmp_path_factory.mktemp("case")
        with (
            subtests.test(wrong=wrong),
            pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be .* of at least 1"),
        ):
            fitted(tmp_path, **wrong)


def test_a_generator_that_would_run_dry_is_refused_before_any_of_it_is_drawn(tmp_path):
    generator = iter(batches())
    with pytest.raises(DataError, match="steps_per_epoch"):
        fitted(tmp_path / "runs", generator)
    assert len(list(generator)) == STEPS
    with pytest.raises(DataError, match=r"`test_ds` is an iterator .*list_iterator"):
        fitted(tmp_path / "runs", test=iter(batches()))
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_other_evaluations_are_the_same_run_and_another_seed_is_another(tmp_path):
    options = ({"eval_freq": 1}, {"eval_freq": 2}, {"seed": 3}, {"eval_freq": 1})
    first, same, other, again = (fitted(tmp_path, num_epochs=1, resume="auto", **one) for one in options)
    assert again.folder == first.folder == same.folder
    assert other.folder != first.folder


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, make_mesh()], ids=["sizes", "mesh"])
def test_many_devices_train_and_evaluate_like_one(mesh, done, tmp_path):
    given = mesh if isinstance(mesh, dict) else Layout(mesh=mesh, param_spec=Partitioning(smallest=1))
    many = fitted(tmp_path, mesh=given)
    assert len(many.state.params["out"]["kernel"].sharding.device_set) == 8
    losses = [[row["train/loss"] for row in rows_of(result) if "train/loss" in row] for result in (many, done)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    accuracies = [[row["val/accuracy"] for row in rows_of(result) if "val/accuracy" in row] for result in (many, done)]
    assert len(accuracies[0]) == EPOCHS
    np.testing.assert_allclose(accuracies[0], accuracies[1], atol=0.11)  # two of 19, of logits that are nearly equal


def test_devices_that_are_not_there_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(LayoutError, match="multiple of 3 .* 8"):
        fitted(tmp_path, mesh={"fsdp": 3})
    assert not list(tmp_path.iterdir())


def test_a_state_of_a_model_without_statistics_may_say_so(tmp_path):
    model, x = nn.Dense(4), X[:SIZE]
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1), batch_stats=None)
    options: dict[str, Any] = {"num_epochs": 1, "log_dir": str(tmp_path), "tensorboard": False, "progress": False}
    result = fit(state, [(x, np.zeros(8, np.int32))], loss_fn=loss_fn, **options)
    assert not result.state.batch_stats
    assert int(result.state.step) == 1


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_the_first_step_is_one_line(tmp_path, capsys):
    class Slow(nn.Module):
        @nn.compact
        def __call__(self, x):
            signal.raise_signal(signal.SIGINT)
            return nn.Dense(4)(x)

    with pytest.raises(KeyboardInterrupt, match="before the first step.*Nothing was saved") as caught:
        fitted(tmp_path, state=Slow(), loss_fn=loss_fn, eval_step=None, optimizer=optax.sgd(0.1))
    sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
    assert capsys.readouterr().err == f"{caught.value}\n"
