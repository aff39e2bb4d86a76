"""Every method of the documents can be overridden, and what is written there happens."""

import inspect
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer.callbacks import LambdaCallback, ModelCheckpointConfig
from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.logger import Logger
from jax_trainer.testing import assert_same_bits, digest, numbered_loader
from tests.trainer.trainer_runs import (
    EXAMPLE,
    STEPS,
    Plain,
    first_examples,
    plain_for,
    rows,
    settings,
    train_plain,
    values,
)

ONE_EPOCH: dict[str, Any] = {"train_epochs": 1, "check_val_every_n_epoch": 0}


def test_init_model_can_begin_from_other_weights(flavour, tmp_path):
    class Zeros(Plain):
        """Begins at zero."""

        def init_model(self, exmp_input: Any) -> Any:
            state = super().init_model(exmp_input)
            return state.replace(params=jax.tree.map(jnp.zeros_like, state.params))

    trainer = plain_for(flavour, tmp_path, kind=Zeros, max_steps=1, **ONE_EPOCH)
    train_plain(trainer)
    assert list(values(trainer, "train/loss_epoch")) == pytest.approx([np.log(4)])  # all classes are alike


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_run_model_init_can_use_other_random_streams(flavour, tmp_path):
    class Other(Plain):
        """Ignores the seed."""

        def run_model_init(self, exmp_input: Any, init_rng: jax.Array) -> Any:
            return super().run_model_init(exmp_input, jax.random.key(99))

    model = nn.Dense(4) if flavour == "linen" else lambda rngs: nnx.Linear(8, 4, rngs=rngs)
    first, second, usual = (
        kind(model=model, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, seed=seed, **settings(tmp_path)).state.params
        for kind, seed in ((Other, 1), (Other, 2), (Plain, 1))
    )
    assert_same_bits(first, second)
    assert digest(first) != digest(usual)


def test_build_model_can_build_another_one(tmp_path):
    class Own(Plain):
        """Has its own idea of a model."""

        def build_model(self, inputs: Any, rngs: nnx.Rngs) -> Any:
            return nnx.Linear(inputs.shape[-1], 4, rngs=rngs)

    trainer = plain_for("nnx", tmp_path, kind=Own, **ONE_EPOCH)
    train_plain(trainer)
    assert set(trainer.state.params) == {"bias", "kernel"}


def test_get_model_rng_names_the_streams_of_a_linen_model(tmp_path):
    asked: list[set[str]] = []

    class Streams(Plain):
        """Has a stream of its own, and looks at what the model is given."""

        def get_model_rng(self, rng: jax.Array) -> dict[str, jax.Array]:
            return {**super().get_model_rng(rng), "noise": rng}

        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
            def look(variables: Any, x: Any, *, rngs: Any, **options: Any) -> Any:
                asked.append(set(rngs))
                return state.apply_fn(variables, x, rngs=rngs, train=train, **options)

            return super().loss_function_linen(params, state._replace(apply_fn=look), batch, rng, train)

    train_plain(plain_for("linen", tmp_path, kind=Streams, **ONE_EPOCH))
    assert asked and all(names == {"params", "dropout", "noise"} for names in asked)


def test_init_optimizer_can_give_any_optimizer_and_knows_the_length(tmp_path):
    lengths: list[Any] = []

    class Own(Plain):
        """Descends plainly."""

        def init_optimizer(self, num_epochs: Any = None, num_train_steps_per_epoch: Any = None) -> Any:
            lengths.append((num_epochs, num_train_steps_per_epoch))
            return optax.sgd(0.0)

    trainer = plain_for("nnx", tmp_path, kind=Own, **ONE_EPOCH)
    before = digest(trainer.state.params)
    train_plain(trainer, num_epochs=2)
    assert lengths == [(2, STEPS)]
    assert digest(trainer.state.params) == before


class OwnOptimizer(Plain):
    """Has the optimizer itself."""

    def init_optimizer(self, num_epochs: Any = None, num_train_steps_per_epoch: Any = None) -> Any:
        return optax.sgd(0.1, momentum=0.9)


def test_a_trainer_that_overrides_init_optimizer_needs_no_other(tmp_path):
    options = settings(tmp_path, train_epochs=1, callbacks={"saver": ModelCheckpointConfig()})
    own: Any = OwnOptimizer(model=nn.Dense(4), exmp_input=EXAMPLE, **options)
    results = train_plain(own)
    given: Any = Plain(model=nn.Dense(4), exmp_input=EXAMPLE, optimizer=optax.sgd(0.1, momentum=0.9), **options)
    train_plain(given)
    assert_same_bits(own.state.opt_state, given.state.opt_state)
    loaded = OwnOptimizer.load_from_checkpoint(own.folder.path, EXAMPLE, model=nn.Dense(4))
    assert loaded.eval_model(first_examples(64)) == results[1]


class Words(Plain):
    """Reads a property of its model, as a tutorial does."""

    def batch_to_input(self, batch: Any) -> Any:
        return jax.nn.one_hot(batch["y"], num_classes=self.model.features)

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
        return super().loss_function_linen(params, state, {**batch, "x": self.batch_to_input(batch)}, rng, train)


def test_the_inputs_may_depend_on_a_property_of_a_linen_model(tmp_path):
    trainer = Words(model=nn.Dense(4), optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **settings(tmp_path, max_steps=1))
    assert list(train_plain(trainer)) == [1]
    assert trainer.predict([EXAMPLE]).shape == (32, 4)


def test_the_weights_of_a_model_cannot_be_read_while_they_are_made(tmp_path_factory, subtests):
    for model in [lambda rngs: nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=nnx.Rngs(0))]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(model=model):
            trainer = Words(model=model, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **settings(tmp_path))
            for use in (lambda one: one.state, train_plain, lambda one: one.predict([EXAMPLE])):
                with pytest.raises(RuntimeError, match="`self.model`.*`batch_to_input`"):
                    use(trainer)


def test_an_override_of_init_optimizer_is_called_with_all_that_is_known(tmp_path_factory, subtests):
    lengths: list[Any] = []

    class Own(Plain):
        def init_optimizer(self, num_epochs: Any = "", num_train_steps_per_epoch: Any = "") -> Any:
            lengths.append((num_epochs, num_train_steps_per_epoch))
            return optax.sgd(0.0)

    for limits, loader, expected in [
        ({"train_epochs": 3}, numbered_loader(32 * STEPS), (3, STEPS)),
        ({"train_epochs": 3, "max_steps_per_epoch": 2}, numbered_loader(32 * STEPS), (3, 2)),
        ({"train_epochs": None, "max_steps": 2 * STEPS + 1}, numbered_loader(32 * STEPS), (3, STEPS)),
        ({"train_epochs": None, "max_steps": 7}, (batch for batch in numbered_loader(32)), (1, 7)),
        ({"train_epochs": None, "fast_dev_run": 2}, numbered_loader(32 * STEPS), (1, 2)),
        ({"train_epochs": 3}, (batch for batch in numbered_loader(32)), (3, None)),
        ({"train_epochs": None, "max_time": 5.0}, numbered_loader(32 * STEPS), (None, STEPS)),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(limits=limits, loader=loader, expected=expected):
            lengths.clear()
            plain_for("nnx", tmp_path, kind=Own, **limits).prepare(loader)
            assert lengths == [expected]


def test_init_logger_can_give_any_logger(tmp_path):
    written: list[str] = []

    class Loud(Logger):
        """Tells what it is given."""

        def write(self, step: int, values: Any) -> None:
            written.extend(values)
            super().write(step, values)

    class Own(Plain):
        """Logs so."""

        def init_logger(self, folder: Any) -> Logger:
            return Loud(self.config.logger, folder.path)

    train_plain(plain_for("nnx", tmp_path, kind=Own, **ONE_EPOCH))
    assert {"train/loss_step", "train/loss_epoch"} <= set(written)


def test_create_functions_can_be_the_steps_of_flax_users(tmp_path):
    class ByHand(Plain):
        """Writes the two steps as one does without a trainer."""

        def create_functions(self) -> Any:
            def loss(params: Any, state: Any, batch: Any) -> jax.Array:
                logits = state.apply_fn({"params": params}, batch["x"])
                return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

            def train_step(state: Any, batch: Any) -> Any:
                value, grads = jax.value_and_grad(loss)(state.params, state, batch)
                return state.apply_gradients(grads=grads), {"loss": value}

            def eval_step(state: Any, batch: Any) -> Any:
                return {"loss": loss(state.params, state, batch)}

            return train_step, eval_step

    options: dict[str, Any] = {"train_epochs": 2, "log_grad_norm": False}
    hand_written, ours = plain_for("linen", tmp_path, kind=ByHand, **options), plain_for("linen", tmp_path, **options)
    results = train_plain(hand_written), train_plain(ours)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), hand_written.state.params, ours.state.params)
    assert results[0][2]["val/loss"] == pytest.approx(results[1][2]["val/loss"], rel=1e-5)
    assert int(hand_written.state.step) == 2 * STEPS


def test_a_training_function_can_wrap_the_one_that_is_there(tmp_path):
    class Wrapped(Plain):
        """Reports the batch, too."""

        def create_training_function(self) -> Any:
            step = super().create_training_function()

            def train_step(state: Any, batch: Any) -> Any:
                state, report = step(state, batch)
                return state, report._replace(metrics=report.metrics.adding(mean_x=batch["x"].mean()))

            return train_step

    wrapped, ours = (plain_for("nnx", tmp_path, kind=kind, **ONE_EPOCH) for kind in (Wrapped, Plain))
    train_plain(wrapped)
    train_plain(ours)
    assert len(list(values(wrapped, "train/mean_x_epoch"))) == 1
    assert_same_bits(wrapped.state, ours.state)


def test_a_step_with_a_wrong_return_value_is_refused(tmp_path_factory, subtests):
    for returned, message in [
        (lambda state: state, "`state, metrics`"),
        (lambda state: (state, 3.0), "metrics as a dict.*got a float"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(returned=returned, message=message):
            step = lambda self, returned=returned: lambda state, batch: returned(state)
            wrong = type("Wrong", (Plain,), {"create_training_function": step})
            with pytest.raises(TypeError, match=message):
                train_plain(plain_for("nnx", tmp_path, kind=wrong, **ONE_EPOCH))


def test_train_epoch_is_called_for_every_epoch_and_returns_its_metrics(tmp_path):
    seen: list[Any] = []

    class Watched(Plain):
        """Looks at every epoch."""

        def train_epoch(self, train_loader: Any, epoch_idx: int, train_metrics: Any = None) -> Any:
            metrics = super().train_epoch(train_loader, epoch_idx, train_metrics)
            seen.append((epoch_idx, metrics["train/loss"], int(self.state.step)))
            return metrics

    trainer = plain_for("nnx", tmp_path, kind=Watched, train_epochs=2)
    train_plain(trainer)
    losses = list(values(trainer, "train/loss_epoch"))
    assert seen == [(1, losses[0], STEPS), (2, losses[1], 2 * STEPS)]


def test_a_train_epoch_that_does_not_train_is_an_error(tmp_path):
    class Idle(Plain):
        """Forgets to train."""

        def train_epoch(self, train_loader: Any, epoch_idx: int, train_metrics: Any = None) -> Any:
            return {}

    with pytest.raises(RuntimeError, match=r"`Idle.train_epoch`.*`super"):
        train_plain(plain_for("nnx", tmp_path, kind=Idle))


def test_epochs_one_by_one_are_the_epochs_of_a_run(flavour, tmp_path):
    complete, single = (plain_for(flavour, tmp_path, train_epochs=2, check_val_every_n_epoch=0) for _ in range(2))
    train_plain(complete)
    metrics = [single.train_epoch(numbered_loader(32 * STEPS), epoch) for epoch in (1, 2)]
    assert_same_bits(single.state, complete.state)
    assert [one["train/loss"] for one in metrics] == list(values(complete, "train/loss_epoch"))


def test_a_method_of_the_instance_is_an_override_too(tmp_path):
    trainer, epochs = plain_for("nnx", tmp_path, train_epochs=2), []

    def train_epoch(*args: Any) -> Any:
        epochs.append(args[1])
        return Plain.train_epoch(trainer, *args)

    def eval_model(loader: Any, mode: str = "val", epoch_idx: int = 0) -> Any:
        return {**Plain.eval_model(trainer, loader, mode, epoch_idx), f"{mode}/batches": len(loader)}

    trainer.train_epoch, trainer.eval_model = train_epoch, eval_model
    results = train_plain(trainer)
    assert epochs == [1, 2]
    assert results[2]["val/batches"] == 2


def test_between_the_loop_and_the_loss_is_only_what_is_overridden(tmp_path):
    def methods_above_the_loss(**overrides: Any) -> set[str]:
        found: list[set[str]] = []

        class Looking(Plain):
            """Looks at its callers."""

            def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
                codes = [frame.frame.f_code for frame in inspect.stack(0)]
                found.append({code.co_name for code in codes if "jax_trainer/trainer/" in code.co_filename})
                return (model.out.bias[...] ** 2).sum(), {}  # every operation is compiled alone

        kind = type("Overriding", (Looking,), overrides)
        trainer = plain_for("nnx", tmp_path, kind=kind, debug=True, log_grad_norm=False, max_steps=1, **ONE_EPOCH)
        trainer.train_model(numbered_loader(32))
        return found[-1]

    def train_epoch(self: Any, *args: Any) -> Any:
        return Plain.train_epoch(self, *args)

    assert methods_above_the_loss() == {"train_model"}
    assert methods_above_the_loss(train_epoch=train_epoch) == {"train_model", "train_epoch"}


HOOKS = [
    *("on_training_start", "on_training_epoch_start", "on_training_epoch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_training_end"),
    *("on_test_epoch_start", "on_test_epoch_end"),
]


def test_the_hooks_of_the_trainer_are_called_in_order_and_before_those_of_callbacks(tmp_path):
    called: list[tuple[str, str]] = []
    kinds = {hook: lambda self, *_, hook=hook: called.append(("trainer", hook)) for hook in HOOKS}
    watcher = LambdaCallback(**{hook: lambda *_, hook=hook: called.append(("callback", hook)) for hook in HOOKS})
    trainer = plain_for("nnx", tmp_path, kind=type("Hooked", (Plain,), kinds), given=[watcher])
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(32))
    for who in ("trainer", "callback"):
        assert [hook for whose, hook in called if whose == who] == HOOKS
    assert all(called.index(("trainer", hook)) < called.index(("callback", hook)) for hook in HOOKS)


def test_what_a_hook_adds_to_the_metrics_is_logged_returned_and_monitored(tmp_path):
    class Scored(Plain):
        """Prefers the first epoch."""

        def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch_idx: int) -> None:
            eval_metrics["val/score"] = 1 / epoch_idx

        def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch_idx: int) -> None:
            test_metrics["test/score"] = 7.0

    saver = ModelCheckpointConfig(monitor="val/score", mode="max")
    trainer = plain_for("nnx", tmp_path, kind=Scored, train_epochs=2, callbacks={"saver": saver})
    results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(64))
    assert [results[1]["val/score"], results[2]["val/score"], results["test"]["test/score"]] == [1.0, 0.5, 7.0]
    assert list(values(trainer, "val/score")) == [1.0, 0.5]
    assert results["test"]["test/loss"] == results[1]["val/loss"]  # the same examples


def test_an_overridden_eval_model_adds_metrics_to_every_evaluation(tmp_path):
    evaluated: list[Any] = []

    class Counting(Plain):
        """Adds how many batches there were."""

        def eval_model(self, data_loader: Any, mode: str = "val", epoch_idx: int = 0, **which: Any) -> dict[str, Any]:
            metrics = super().eval_model(data_loader, mode, epoch_idx)
            evaluated.append((mode, epoch_idx, metrics[f"{mode}/loss"]))
            return {**metrics, f"{mode}/batches": len(data_loader)}

    trainer = plain_for(
        "nnx", tmp_path, kind=Counting, callbacks={"s": ModelCheckpointConfig(monitor="val/batches", mode="max")}
    )
    results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(32))
    assert (results[1]["val/batches"], results["test"]["test/batches"]) == (2, 1)
    assert list(values(trainer, "val/batches")) == [2]
    assert evaluated == [("val", 1, results[1]["val/loss"]), ("test", 1, results["test"]["test/loss"])]


def test_metrics_without_a_prefix_are_not_added(tmp_path):
    class Bare(Plain):
        """Forgets the prefix."""

        def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch_idx: int) -> None:
            eval_metrics["score"] = 1.0

    with pytest.raises(ValueError, match="'val/score'.* got score"):
        train_plain(plain_for("nnx", tmp_path, kind=Bare))


class Worst(Plain):
    """The largest loss is the best."""

    def is_new_model_better(self, new_metrics: Any, old_metrics: Any) -> bool:
        return old_metrics is None or new_metrics["val/loss"] > old_metrics["val/loss"]


def test_is_new_model_better_decides_which_weights_are_tested(tmp_path_factory, subtests):
    for callbacks in [{}, {"saver": ModelCheckpointConfig(monitor="val/no_such_loss")}]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(callbacks=callbacks):
            trainer = plain_for("nnx", tmp_path, kind=Worst, train_epochs=3, callbacks=callbacks)
            results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(64))
            assert results["test"]["test/loss"] == results[1]["val/loss"] > results[3]["val/loss"]


def test_without_a_checkpoint_the_best_weights_are_tested_all_the_same(tmp_path):
    class Drifting(Plain):
        """Gets worse and worse."""

        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            loss, _ = super().loss_function(model, batch, train)
            return (-loss if train else loss), {}

    trainer = plain_for("nnx", tmp_path, kind=Drifting, train_epochs=3)
    results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(64))
    assert results["test"]["test/loss"] == results[1]["val/loss"] < results[3]["val/loss"]
    assert (results.tested, results.best[:2], results.best[3:]) == ("best", (1, STEPS), ("val/loss", "min"))
    assert trainer.test_model(first_examples(64)) == results["test"]
    assert trainer.test_model(first_examples(64), which="last")["test/loss"] == results[3]["val/loss"]


def test_without_a_metric_to_compare_weights_by_testing_is_an_error(tmp_path):
    class Mute(Plain):
        """Has another name for its loss."""

        def is_new_model_better(self, new_metrics: Any, old_metrics: Any) -> bool:
            return Plain.is_new_model_better(self, {"val/other": 1.0}, old_metrics)

    trainer = plain_for("nnx", tmp_path, kind=Mute)
    with pytest.raises(ValueError, match="val/val_metric.*val/acc.*val/loss"):
        trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(64))


def test_better_is_what_the_usual_metrics_say(tmp_path_factory, subtests):
    for new, old, better in [
        ({"val/acc": 0.5, "val/loss": 9.0}, {"val/acc": 0.4, "val/loss": 1.0}, True),
        ({"val/val_metric": 2.0, "val/acc": 0.9}, {"val/val_metric": 1.0, "val/acc": 0.1}, False),
        ({"val/loss": 1.0}, {"val/loss": 1.0}, False),
        ({"val/loss": float("nan")}, {"val/loss": 1.0}, False),
        ({"val/loss": 1.0}, {"val/loss": float("nan")}, True),
        ({"val/loss": 1.0}, None, True),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(new=new, old=old, better=better):
            assert plain_for("nnx", tmp_path).is_new_model_better(new, old) is better


def test_metrics_can_be_saved_whether_a_run_is_on_or_over(tmp_path):
    class Saving(Plain):
        """Saves while it trains."""

        def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch_idx: int) -> None:
            self.save_metrics("during", train_metrics)

    trainer = plain_for("nnx", tmp_path, kind=Saving, **ONE_EPOCH)
    with pytest.raises(ValueError, match="no run folder"):
        trainer.save_metrics("before", {})
    train_plain(trainer)
    trainer.save_metrics("after", {"a/b": np.float32(0.5), "matrix": np.eye(2)})
    folder = trainer.folder.path / "metrics"
    assert "train/loss" in json.loads((folder / "during.json").read_text())
    assert json.loads((folder / "after.json").read_text()) == {"a/b": 0.5, "matrix": [[1.0, 0.0], [0.0, 1.0]]}


def test_a_model_can_be_saved_while_it_trains_and_loaded_by_its_epoch(tmp_path):
    class Saving(Plain):
        """Saves every epoch."""

        def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch_idx: int) -> None:
            kept.append(jax.tree.map(jnp.copy, self.state.params))
            self.save_model()

    kept: list[Any] = []
    saver = ModelCheckpointConfig(every_n_epochs=0, save_top_k=2)
    trainer = plain_for("nnx", tmp_path, kind=Saving, train_epochs=2, callbacks={"saver": saver})
    train_plain(trainer)
    for epoch in (1, 2):
        trainer.load_model(epoch)
        assert_same_bits(trainer.state.params, kept[epoch - 1])
    with pytest.raises(CheckpointError, match="No checkpoint of epoch 7 in .*: 1, 2"):
        trainer.load_model(7)
    present = digest(trainer.state)
    trainer.load_model(77, raise_if_not_found=False)
    trainer.load_model(which=7777, raise_if_not_found=False)
    assert digest(trainer.state) == present
    empty = plain_for("nnx", tmp_path, **ONE_EPOCH)
    assert empty.load_model(77, raise_if_not_found=False) is None  # there is no run yet
    with pytest.raises(ValueError, match="no run folder"):
        empty.load_model(77)
    train_plain(empty)
    before = digest(empty.state)
    empty.load_model(raise_if_not_found=False)
    assert digest(empty.state) == before


def test_tracker_shows_progress_only_where_it_is_wanted(tmp_path, capsys):
    shown, silent = (plain_for("nnx", tmp_path, enable_progress_bar=bar) for bar in (True, False))
    assert list(shown.tracker(range(3), desc="three things", leave=False)) == [0, 1, 2]  # an option of tqdm
    assert "three things" in capsys.readouterr().err
    assert list(silent.tracker(range(3), desc="three things")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_rows_of_a_run_begin_with_its_size(tmp_path):
    trainer = plain_for("nnx", tmp_path, **ONE_EPOCH)
    train_plain(trainer)
    count = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.params))
    assert rows(trainer)[0] == {"step": 0, "param/num_model_params": count}
