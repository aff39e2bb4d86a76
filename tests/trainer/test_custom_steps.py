"""A step of one's own does what it looks like: its keys, statistics, gradients and fields are those of the run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.testing import assert_close, assert_same_bits, numbered_loader
from tests.trainer.trainer_runs import EXAMPLE, STEPS, Plain, WatcherConfig, first_examples, settings, values, waves

WIDTH = EXAMPLE["x"].shape[-1]


class LinenNet(nn.Module):
    """Has statistics, and randomness if `dropout`, which takes long to compile."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(4, kernel_init=waves)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        self.norm, self.dropout = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 4, kernel_init=waves, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(self.norm(x)))


class OwnStep(Plain):
    """The steps as documents write them, of a linen model and of one of nnx."""

    def create_training_function(self) -> Any:
        return self._linen_step if self.model_mode == "linen" else self._nnx_step

    def _linen_step(self, state: Any, batch: Any) -> Any:
        loss_fn = lambda params: self.loss_function_linen(params, state, batch, state.rng, train=True)
        (loss, (mutable, metrics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, mutable_variables=mutable), {"loss": loss, **metrics}

    def _nnx_step(self, state: Any, batch: Any) -> Any:
        loss_fn = lambda model: self.loss_function(model, batch)
        (loss, metrics), grads = nnx.value_and_grad(loss_fn, has_aux=True)(state.model)
        return state.apply_gradients(grads=grads), {"loss": loss, **metrics}


class Guide(OwnStep):
    """As the guide writes it: its own `apply_fn`, and the next key in the state."""

    def _linen_step(self, state: Any, batch: Any) -> Any:
        rng, key = jax.random.split(state.rng)

        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            rngs, x = {"dropout": key}, jnp.linspace(0, 1, batch["x"].size).reshape(batch["x"].shape)
            logits, changed = state.apply_fn(variables, x, train=True, rngs=rngs, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), (changed, logits[0])

        (loss, (changed, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = jax.tree.map(jnp.zeros_like, grads)  # so that only the key makes steps differ
        state = state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"], **self.fields(rng))
        return state, {"loss": loss, "key": {"value": logits, "mode": "concat"}}

    def fields(self, rng: Any) -> dict[str, Any]:
        return {"rng": rng}


class WithoutRng(Guide):
    def fields(self, rng: Any) -> dict[str, Any]:
        return {}


def trainer_of(kind: Any, flavour: str, folder: Any, *, dropout: float = 0.0, **options: Any) -> Any:
    model = LinenNet(dropout) if flavour == "linen" else lambda rngs: NnxNet(rngs, dropout)
    settled = settings(folder, **{"train_epochs": 1, "check_val_every_n_epoch": 0, "log_grad_norm": False, **options})
    return kind(model=model, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **settled)


def train(trainer: Any, **options: Any) -> Any:
    return trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), **options)


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_a_flax_style_step_matches_the_default_step(flavour, tmp_path):
    own, ours = (trainer_of(kind, flavour, tmp_path, dropout=0.5) for kind in (OwnStep, Plain))
    before = jax.tree.map(np.asarray, own.state.model_state)
    train(own)
    train(ours)
    assert_close(own.state, ours.state, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), before, own.state.model_state)
    assert any(jax.tree.leaves(moved))  # the statistics


def test_every_step_has_another_key_whether_the_step_keeps_one_in_its_state_or_not(tmp_path_factory, subtests):
    seen: list[Any] = []
    for kind in [Guide, WithoutRng]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(kind=kind):
            trainer = trainer_of(kind, "linen", tmp_path, dropout=0.5, check_val_every_n_epoch=0)
            trainer.on_training_epoch_end = lambda metrics, epoch_idx: seen.append(metrics["train/key"])
            seen.clear()
            before = np.asarray(trainer.state.rng)
            train(trainer)
            assert (np.asarray(trainer.state.rng) != before).any() == (
                kind is Guide
            )  # what it was given is what it has
            assert len({tuple(row) for row in np.reshape(seen[0], (STEPS, -1))}) == STEPS


@pytest.mark.parametrize(
    ("kind", "flavour", "options"),
    [
        (Guide, "linen", {}),
        pytest.param(OwnStep, "nnx", {"ema": 0.9, "on_nonfinite": "skip"}, marks=pytest.mark.slow),
        pytest.param(OwnStep, "linen", {"ema": 0.9, "on_nonfinite": "skip"}, marks=pytest.mark.slow),
    ],
)
def test_a_custom_step_resumes_to_the_same_bits(kind, flavour, options, tmp_path):
    saver = {"saver": ModelCheckpointConfig()}
    stopping = {**saver, "watcher": WatcherConfig(stop_after=1)}
    common = {"train_epochs": 2, "check_val_every_n_epoch": 1, "dropout": 0.5, **options}
    complete = trainer_of(kind, flavour, tmp_path, callbacks=saver, **common)
    train(complete)
    part = trainer_of(kind, flavour, tmp_path, callbacks=stopping, **common)
    train(part)
    assert int(part.state.step) == STEPS
    resumed = trainer_of(kind, flavour, tmp_path, callbacks=saver, **common)
    train(resumed, resume=part.folder.path)
    assert_same_bits(resumed.state, complete.state)


class Jitted(OwnStep):
    def create_training_function(self) -> Any:
        return jax.jit(super().create_training_function())


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_a_step_may_be_compiled_already_and_run_in_chunks(flavour, tmp_path):
    single, chunks = trainer_of(OwnStep, flavour, tmp_path), trainer_of(Jitted, flavour, tmp_path, steps_per_call=2)
    train(single)
    train(chunks)
    assert_same_bits(chunks.state, single.state)


class NanGradients(OwnStep):
    """One step has a loss that is finite, and gradients that are not."""

    def _linen_step(self, state: Any, batch: Any) -> Any:
        new, reported = super()._linen_step(state, batch)
        spoilt = jax.tree.map(lambda p: jnp.where(state.step == 1, jnp.nan, p), new.params)
        return new.replace(params=spoilt), reported


def test_the_guard_finds_non_finite_gradients_in_a_custom_step(tmp_path):
    trainer = trainer_of(NanGradients, "linen", tmp_path, on_nonfinite="skip")
    train(trainer)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(trainer.state.params))
    assert list(values(trainer, "guard/skipped_epoch")) == [1]


def test_accumulating_a_step_that_computes_its_own_gradients_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`accumulate` is 2"):
        train(trainer_of(OwnStep, "linen", tmp_path, accumulate=2))


def test_f16_needs_a_step_that_scales_its_loss(tmp_path):
    with pytest.raises(ValueError, match="`precision` is f16"):
        train(trainer_of(OwnStep, "linen", tmp_path, precision="f16"))


class Wrapping(Plain):
    def create_training_function(self) -> Any:
        step = super().create_training_function()
        return lambda state, batch: step(state, batch)


@pytest.mark.slow
def test_a_custom_step_that_calls_the_default_one_accumulates_and_draws_like_it(flavour, tmp_path):
    wrapping, ours = (trainer_of(kind, flavour, tmp_path, dropout=0.5, accumulate=2) for kind in (Wrapping, Plain))
    train(wrapping)
    train(ours)
    assert_same_bits(wrapping.state, ours.state)


class OwnEvaluation(Plain):
    def create_evaluation_function(self) -> Any:
        def eval_step(state: Any, batch: Any) -> Any:
            if self.model_mode == "nnx":
                logits = state.model(batch["x"])
            else:
                logits, _ = state.apply(state.params, batch["x"], train=False)
            loss, metrics = self._evaluate(logits, batch)
            return {"loss": loss, **metrics}

        return eval_step


def test_a_custom_evaluation_has_the_model_in_evaluation_mode(flavour, tmp_path):
    trainers = [trainer_of(kind, flavour, tmp_path, dropout=0.5) for kind in (OwnEvaluation, Plain)]
    own, ours = (trainer.eval_model(first_examples(64)) for trainer in trainers)
    assert own == pytest.approx(ours, rel=1e-6)


def test_a_wrong_loss_shape_in_a_custom_step_is_named_with_the_batch(flavour, tmp_path):
    class Shaped(OwnStep):
        def _evaluate(self, logits: Any, batch: Any) -> Any:
            return logits, {}

    with pytest.raises(ValueError, match=r"\(32, 4\) from .*batch"):
        train(trainer_of(Shaped, flavour, tmp_path))


def test_an_error_on_the_example_batch_names_it(tmp_path):
    parts = {"model": NnxNet, "optimizer": optax.sgd(0.1), "exmp_input": {"x": EXAMPLE["x"]}}
    for use in ("train_model", "dry_run"):
        with pytest.raises(KeyError, match="y") as error:
            getattr(OwnStep(**parts, **settings(tmp_path)), use)(numbered_loader(32 * STEPS))
        notes = "".join(error.value.__notes__)
        assert "batch['x'] float32[32, 8]" in notes and "`exmp_input`" in notes


class InPlace(OwnStep):
    """An nnx step that updates the module itself, as a loop by hand does."""

    def _nnx_step(self, state: Any, batch: Any) -> Any:
        (loss, metrics), grads = nnx.value_and_grad(lambda model: self.loss_function(model, batch), has_aux=True)(
            state.model
        )
        nnx.Optimizer(state.model, optax.sgd(0.1), wrt=nnx.Param).update(state.model, grads)
        return state, {"loss": loss, **metrics}


class Clipped(OwnStep):
    """Changes the module after the update."""

    def _nnx_step(self, state: Any, batch: Any) -> Any:
        state, metrics = super()._nnx_step(state, batch)
        state.model.out.bias[...] = jnp.full_like(state.model.out.bias[...], 7.0)
        state.model.norm.mean[...] = jnp.full_like(state.model.norm.mean[...], 3.0)
        return state, metrics


def test_parameters_that_a_step_updates_in_the_nnx_module_itself_are_trained(tmp_path):
    trainer = trainer_of(InPlace, "nnx", tmp_path)
    before = np.asarray(trainer.state.params["out"]["kernel"])
    train(trainer)
    assert (np.asarray(trainer.state.params["out"]["kernel"]) != before).any()
    assert int(trainer.state.step) == STEPS


def test_what_a_step_changes_in_the_nnx_module_after_the_update_is_in_the_state(tmp_path):
    trainer = trainer_of(Clipped, "nnx", tmp_path)
    train(trainer)
    assert (np.asarray(trainer.state.params["out"]["bias"]) == 7).all()
    assert (np.asarray(trainer.state.model_state["norm"]["mean"]) == 3).all()


class Replacing(OwnStep):
    """As Flax's guide to BatchNorm writes it: `state.replace(batch_stats=…)`."""

    collection = "batch_stats"

    def _linen_step(self, state: Any, batch: Any) -> Any:
        loss_fn = lambda params: self.loss_function_linen(params, state, batch, state.rng, train=True)
        (loss, (mutable, metrics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        return state.replace(**{self.collection: mutable["batch_stats"]}), {"loss": loss, **metrics}


class Misspelt(Replacing):
    collection = "batch_stat"


def test_statistics_may_be_replaced_as_flax_users_write_it(tmp_path):
    replacing, ours = (trainer_of(kind, "linen", tmp_path) for kind in (Replacing, Plain))
    train(replacing)
    train(ours)
    assert_close(replacing.state, ours.state, rtol=1e-5)


def test_a_field_that_the_state_has_not_is_named_where_it_is_replaced(tmp_path):
    with pytest.raises(TypeError, match=r"`replace` got `batch_stat`.*collections are: batch_stats"):
        train(trainer_of(Misspelt, "linen", tmp_path))
