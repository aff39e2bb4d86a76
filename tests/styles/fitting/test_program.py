"""Whatever `fit` is given to train becomes the same program."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state

from jax_trainer.adapters import FunctionModel, linen_program
from jax_trainer.core import FlaxState, TrainState, compile_program
from jax_trainer.optimizer import SGDConfig
from jax_trainer.styles.fit_program import FitTarget, fit_target
from jax_trainer.testing import TinyLinen, TinyNNX, assert_same_bits, cross_entropy, linen_loss, tiny_program
from tests.styles.style_runs import variables_of

RNG = np.random.default_rng(0)
BATCH = (RNG.normal(size=(6, 8)).astype(np.float32), RNG.integers(4, size=6))
TX = optax.sgd(0.1)
MODEL = TinyLinen()
VARIABLES = variables_of(MODEL, BATCH[0])
entropy = cross_entropy


def loss_fn(logits, labels):
    return entropy(logits, labels).mean()


def accuracy(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (state.apply_fn(variables, batch[0], train=False).argmax(-1) == batch[1]).mean()


def made(given, loss=loss_fn, eval_step=None, optimizer=None, split=None) -> FitTarget:
    options = {"loss_fn": loss, "eval_step": eval_step, "optimizer": optimizer, "split_batch": split}
    return fit_target(given, **options, total_steps=10)


def stepped(trained: FitTarget) -> tuple[TrainState, dict[str, Any], Any]:
    """The state after one step, what evaluating it tells, and what the model then makes of the batch."""
    program = compile_program(trained.program)
    state = program.init(trained.key, BATCH)
    buffer = program.train_buffer(state, BATCH, 1)
    state, _, _ = program.train_step(state, buffer, BATCH)
    evaluated = jax.jit(trained.program.eval_step)(state, BATCH).by_name
    return state, {name: float(metric.value) for name, metric in evaluated.items()}, program.predict(state, BATCH)


def flax_state(kind=train_state.TrainState, **fields):
    return kind.create(apply_fn=MODEL.apply, params=VARIABLES["params"], tx=TX, **fields)


class WithStatistics(train_state.TrainState):
    batch_stats: Any
    dropout_key: Any = None
    note: dict = flax.struct.field(pytree_node=False, default_factory=dict)


@pytest.fixture(scope="module")
def ours():
    state = TrainState.create(apply_fn=MODEL.apply, **VARIABLES, tx=TX)
    return stepped(made(state, eval_step=accuracy))


def test_a_state_of_flax_is_trained_as_one_of_ours_and_comes_back_as_what_it_was(ours):
    key = jax.random.key(5)
    given = flax_state(WithStatistics, batch_stats=VARIABLES["batch_stats"], dropout_key=key)
    trained = made(given, eval_step=accuracy)
    state, evaluated, outputs = stepped(trained)
    assert_same_bits(state.params, ours[0].params)
    assert evaluated == ours[1]
    assert_same_bits(outputs, ours[2])
    back: Any = trained.as_passed(state)
    assert type(back) is WithStatistics
    assert int(back.step) == 1
    assert_same_bits(back.batch_stats, state.model_state["batch_stats"])
    assert back.dropout_key is key
    assert trained.name == "TinyLinen"


def test_a_state_of_flax_with_python_numbers_in_it_is_compiled_for_once():
    params, tx = {"w": jnp.full((8, 4), 0.5)}, optax.inject_hyperparams(optax.sgd)(0.1)  # of weak types

    def apply(variables, x, *, mutable=None, **rest):
        outputs = x @ variables["params"]["w"]
        return outputs if mutable is None else (outputs, {})

    trained = made(train_state.TrainState.create(apply_fn=apply, params=params, tx=tx))
    state = compile_program(trained.program).init(trained.key, BATCH)
    after = jax.eval_shape(trained.program.train_step, state, BATCH)[0]
    assert [leaf.weak_type for leaf in jax.tree.leaves(state)] == [leaf.weak_type for leaf in jax.tree.leaves(after)]


def test_an_evaluation_reports_the_loss_and_what_eval_step_finds(ours):
    state, evaluated, outputs = ours
    expected: Any = jax.jit(MODEL.apply)({"params": state.params, **state.model_state}, BATCH[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    assert evaluated["loss"] == pytest.approx(float(jax.jit(loss_fn)(expected, BATCH[1])), rel=1e-6)
    assert evaluated["accuracy"] == pytest.approx((np.asarray(expected).argmax(-1) == BATCH[1]).mean())


def test_a_linen_module_begins_as_the_adapter_would():
    trained = made(MODEL, optimizer=TX, eval_step=accuracy)
    state = compile_program(trained.program).init(trained.key, BATCH)
    by_name = {"x": BATCH[0], "y": BATCH[1]}
    program = linen_program(MODEL, linen_loss, TX, to_input=lambda batch: batch["x"])
    assert_same_bits(state.params, compile_program(program).init(jax.random.key(0), by_name).params)
    given = trained.as_passed(state)
    assert isinstance(given, FlaxState)
    assert given.apply_fn({"params": given.params, **given.model_state}, BATCH[0]).shape == (6, 4)


def test_an_nnx_module_is_evaluated_in_evaluation_mode():
    module = TinyNNX(nnx.Rngs(0), dropout=0.5)
    seen = []

    def eval_step(model, batch):
        seen.append(model.dropout.deterministic)
        return {"acc": (model(batch[0]).argmax(-1) == batch[1]).mean()}

    trained = made(module, optimizer=TX, eval_step=eval_step)
    state, evaluated, outputs = stepped(trained)
    assert seen == [True]
    assert evaluated["acc"] == pytest.approx((np.asarray(outputs).argmax(-1) == BATCH[1]).mean())
    assert trained.write_back(state) is module
    assert_same_bits(nnx.to_pure_dict(nnx.state(module, nnx.Param)), state.params)


def test_the_optimizer_of_a_module_may_be_optaxs_flaxs_or_a_configuration():
    module = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    kinds = [TX, nnx.Optimizer(module, TX, wrt=nnx.Param), SGDConfig(learning_rate=0.1)]
    for kind in kinds:
        program = made(module, optimizer=kind).program
        state = program.init(jax.random.key(0), BATCH)
        after, report = jax.jit(program.train_step)(state, BATCH)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, report.grads)
        assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-6), after.params, moved))


def test_a_program_is_trained_as_it_is():
    program = tiny_program("linen")
    trained = made(program, loss=None)
    assert trained.program is program
    for wrong in ({"loss": loss_fn}, {"loss": None, "optimizer": TX}):
        with pytest.raises(TypeError, match="`Program`.*loss.*optimizer"):
            made(program, **wrong)


class Plain(nn.Module):
    """A model that has nothing but parameters."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


def test_a_loss_may_call_the_model_itself():
    module = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def on_model(model, batch):
        return loss_fn(model(batch[0]), batch[1])

    mine, usual = (stepped(made(module, loss, optimizer=TX)) for loss in (on_model, loss_fn))
    assert_same_bits(mine[0].params, usual[0].params)
    plain = Plain()

    def on_params(params, batch):
        return loss_fn(plain.apply({"params": params}, batch[0]), batch[1])

    mine, usual = (stepped(made(plain, loss, optimizer=TX)) for loss in (on_params, loss_fn))
    assert_same_bits(mine[0].params, usual[0].params)


def test_functions_and_callable_pytrees_are_trained_like_a_linen_module():
    variables: Any = Plain().init(jax.random.key(0), BATCH[0])
    params = variables["params"]["Dense_0"]
    apply = lambda params, x: x @ params["kernel"] + params["bias"]
    functions = FunctionModel(lambda key, x: params, apply)
    given = [functions, jax.tree_util.Partial(apply, params)]
    expected = stepped(made(TrainState.create(apply_fn=Plain().apply, params=variables["params"], tx=TX)))
    for model in given:
        evaluated = lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).mean()
        trained = made(model, optimizer=TX, eval_step=evaluated)
        state, metrics, outputs = stepped(trained)
        np.testing.assert_allclose(outputs, expected[2], rtol=1e-5, atol=1e-6)
        assert metrics["loss"] == pytest.approx(expected[1]["loss"], rel=1e-6)
        assert metrics["accuracy"] == pytest.approx(float((outputs.argmax(-1) == BATCH[1]).mean()))
        np.testing.assert_allclose(trained.write_back(state)(BATCH[0]), outputs, rtol=1e-5, atol=1e-6)
        on_model = lambda model, batch: loss_fn(model(batch[0]), batch[1])
        assert_same_bits(stepped(made(model, on_model, optimizer=TX))[0].params, state.params)


class Flagged(nnx.Module):
    """An nnx module whose call takes `train`."""

    def __init__(self, rngs):
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, train=False):
        return self.out(x) * (2 if train else 1)


def test_a_model_whose_call_takes_train_receives_it():
    modes = []
    loss = lambda logits, labels, train: modes.append(train) or loss_fn(logits, labels)
    trained = made(Flagged(nnx.Rngs(0)), loss, optimizer=TX)
    state = trained.program.init(trained.key, BATCH)
    doubled = 2 * (BATCH[0] @ state.params["out"]["kernel"] + state.params["out"]["bias"])
    _, report = jax.jit(trained.program.train_step)(state, BATCH)
    assert float(report.metrics.by_name["loss"].value) == pytest.approx(float(loss_fn(doubled, BATCH[1])), rel=1e-5)
    assert modes == [True]


class NeedsTrain(nn.Module):
    """A linen module that requires `train`."""

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(4)(x)


def test_a_linen_module_that_requires_train_can_be_initialised():
    trained = made(NeedsTrain(), optimizer=TX)
    assert set(compile_program(trained.program).init(trained.key, BATCH).params) == {"Dense_0"}


def test_several_inputs_are_several_arguments():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.out = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, a, b):
            return self.out(a + b)

    split = lambda batch: ((batch[0], batch[0]), batch[1])
    assert stepped(made(Two(nnx.Rngs(0)), optimizer=TX, split=split))[2].shape == (6, 4)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(MODEL, id="linen", marks=pytest.mark.slow),
        pytest.param(nnx.Linear(8, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0)), id="nnx"),
    ],
)
def test_a_loss_gets_a_key_and_the_step_where_it_asks(given):
    def loss(logits, labels, rng, step):
        return loss_fn(logits, labels), {"drawn": jax.random.uniform(rng), "step": step}

    trained = made(given, loss, optimizer=TX)
    program = compile_program(trained.program)
    state = program.init(trained.key, BATCH)
    drawn = [trained.program.eval_step(state.replace(rng=state.rng + more), BATCH).by_name["drawn"] for more in (0, 1)]
    assert float(drawn[0].value) != float(drawn[1].value)
    assert stepped(trained)[1]["step"] == 1


def model_first(model, batch): ...
def params_first(params, batch): ...


def test_what_cannot_be_trained_is_refused_at_once(subtests):
    for given, options, words in [
        (object(), {}, "model is a object.*linen or nnx module"),
        (TinyLinen, {"optimizer": TX}, "class TinyLinen"),
        (lambda rngs: TinyNNX(rngs), {"optimizer": TX}, r"function <lambda>\. "),
        (MODEL, {}, "`optimizer`.*None"),
        (MODEL, {"optimizer": 0.1}, "`optimizer`.*0.1"),
        (MODEL, {"optimizer": TX, "loss": None}, r"Pass `loss_fn`"),
        (MODEL, {"optimizer": TX, "loss": model_first}, r"`loss_fn\(model, batch\)`.*linen"),
        (TinyNNX(nnx.Rngs(0)), {"optimizer": TX, "loss": params_first}, r"`loss_fn\(params, batch\)`.*nnx"),
        (flax_state(), {"optimizer": TX}, "`optimizer`.*`tx`"),
        (MODEL, {"optimizer": TX, "eval_step": lambda: 0}, "`eval_step` has no parameters"),
    ]:
        with subtests.test(given=given, options=options, words=words), pytest.raises(TypeError, match=words):
            made(given, **options)


def test_a_loss_that_could_not_update_the_statistics_is_refused():
    trained = made(MODEL, lambda params, batch: jnp.float32(0), optimizer=TX)
    with pytest.raises(TypeError, match=r"batch_stats.*loss_fn\(logits, labels\)"):
        compile_program(trained.program).shapes(trained.key, BATCH)
