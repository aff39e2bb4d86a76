"""Several optimizers in one step: each updates its own parameters by its own loss, as a hand-written loop does."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program, stateful_program
from jax_trainer.core import Program, TrainState, compile_program, stream, with_ema, with_finite_guard
from jax_trainer.core.optimizers import AlternatingOptimizer, Optimizers
from jax_trainer.sharding import Layout, Partitioning, make_mesh
from jax_trainer.testing import assert_close, assert_same_bits

BATCH = np.linspace(-1, 1, 6, dtype=np.float32)
STEPS = 4


def init(key: jax.Array, batch: Any) -> Any:
    return {"left": {"w": jnp.asarray([1.0, -2.0])}, "right": {"w": jnp.asarray([0.5]), "b": jnp.asarray(0.1)}}


def losses(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    """Each loss depends on all parameters, and on the key."""
    left, right, b = params["left"]["w"], params["right"]["w"], params["right"]["b"]
    noise = jax.random.normal(rng)
    return {
        "left": ((left.sum() - right.sum() * batch + 0.1 * noise) ** 2).mean(),
        "right": ((right * left[0] - b * batch + 0.2 * noise) ** 2).mean(),
    }, {"total": left.sum()}


def one_of(params: Any, batch: Any, *, rng: jax.Array, train: bool, optimizer: str) -> Any:
    """The same as a function of the optimizer."""
    found, metrics = losses(params, batch, rng=rng, train=train)
    return found[optimizer], metrics


def alternating(loss: Any = losses, left: Any = None, right: Any = None, **options: Any) -> Program:
    optimizers = {"left": left or optax.sgd(0.1, momentum=0.9), "right": right or optax.adam(0.05)}
    return function_program(init, loss, Optimizers(optimizers), **options)


def trained(program: Program, steps: int = STEPS, batch: Any = BATCH) -> tuple[TrainState, list[Any]]:
    state, reports, step = program.init(jax.random.key(0), batch), [], jax.jit(program.train_step)
    for _ in range(steps):
        state, report = step(state, batch)
        reports.append(report)
    return state, reports


@partial(jax.jit, static_argnums=0)
def gradient(name: str, params: Any, key: jax.Array) -> Any:
    """Of the loss `name`, by the parameters of that name."""
    return jax.grad(lambda own: losses({**params, name: own}, BATCH, rng=key, train=True)[0][name])(params[name])


def by_hand(optimizers: dict[str, AlternatingOptimizer], steps: int = STEPS) -> dict[str, Any]:
    """The loop that the step replaces."""
    root = jax.random.key(0)
    params = init(root, BATCH)
    states = {name: one.tx.init(params[name]) for name, one in optimizers.items()}
    for step in range(steps):
        rng = jax.random.fold_in(stream(root, "train"), step)
        for name, one in optimizers.items():
            for number in range(one.steps if (step + 1) % one.every == 0 else 0):
                grads = gradient(name, params, jax.random.fold_in(stream(rng, name), number))
                updates, states[name] = one.tx.update(grads, states[name], params[name])
                params[name] = optax.apply_updates(params[name], updates)
    return params


TURNS: list[Any] = [
    ({"every": 3}, {"steps": 2}, ("left", "right")),
    ({"steps": 3, "every": 2}, {}, ("right", "left")),
    ({}, {}, ("left", "right")),
]


@pytest.mark.parametrize(
    ("left", "right", "order", "loss"),
    [
        *((*TURNS[0], loss) for loss in (losses, one_of)),
        (*TURNS[1], losses),
        *(pytest.param(*turns, one_of, marks=pytest.mark.slow) for turns in TURNS[1:]),
        pytest.param(*TURNS[2], losses, marks=pytest.mark.slow),
    ],
)
def test_the_optimizers_take_turns_as_in_a_hand_written_loop(left, right, order, loss):
    both = {
        "left": AlternatingOptimizer(optax.sgd(0.1, momentum=0.9), **left),
        "right": AlternatingOptimizer(optax.adam(0.05), **right),
    }
    optimizers = {name: both[name] for name in order}
    state, _ = trained(function_program(init, loss, Optimizers(optimizers)))
    assert_close(state.params, by_hand(optimizers), rtol=2e-5)
    assert int(state.step) == STEPS


def test_the_parameters_of_others_are_not_differentiated():
    @jax.custom_vjp
    def only_forward(x: jax.Array) -> jax.Array:
        return x

    differentiated: list[str] = []

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        differentiated.append("the other")
        return (gradient,)

    only_forward.defvjp(lambda x: (x, None), backward)

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool, optimizer: str) -> Any:
        other = "right" if optimizer == "left" else "left"
        return (params[optimizer]["w"].sum() * only_forward(params[other]["w"]).sum()) ** 2

    program = alternating(loss)
    state, _ = trained(program, 1)
    assert differentiated == []
    start = program.init(jax.random.key(0), BATCH).params
    assert all((state.params[name]["w"] != start[name]["w"]).any() for name in ("left", "right"))
    jax.grad(lambda params: loss(params, BATCH, rng=jax.random.key(0), train=True, optimizer="left"))(start)
    assert differentiated == ["the other"]  # by a gradient of all parameters


def test_an_optimizer_that_does_not_update_keeps_its_bits_and_its_count():
    left = AlternatingOptimizer(optax.adam(optax.linear_schedule(0.1, 0.0, 2)), every=2)
    program = alternating(left=left)
    (first, _), (second, _), (third, reports) = (trained(program, steps) for steps in (1, 2, 3))
    start = program.init(jax.random.key(0), BATCH)
    for before, after in ((start, first), (second, third)):
        assert_same_bits(after.params["left"], before.params["left"])
        assert_same_bits(after.opt_state.by_name["left"], before.opt_state.by_name["left"])
    assert int(second.opt_state.by_name["left"][0].count) == 1
    weights = [report.metrics.weight_of("loss/left") for report in reports]
    assert [int(weight) for weight in weights] == [0, 6, 0]
    assert all(report.metrics.weight_of("loss/right") == 6 for report in reports)


def test_the_loss_of_a_step_is_the_sum_of_what_it_minimised():
    _, reports = trained(alternating(left=AlternatingOptimizer(optax.sgd(0.1), every=2)), 2)
    for report in reports:
        values = {name: float(one.value) for name, one in report.metrics.by_name.items()}
        assert values["loss"] == pytest.approx(values["loss/left"] + values["loss/right"])
        assert "total" in values and report.metrics.by_name["total"].weight is None
    assert float(reports[0].metrics.by_name["loss/left"].value) == 0


def test_a_step_in_which_no_optimizer_updates_counts_nothing():
    left, right = (AlternatingOptimizer(optax.sgd(0.1), every=every) for every in (2, 3))
    _, reports = trained(alternating(left=left, right=right), 3)
    assert [int(report.metrics.weight_of("loss")) for report in reports] == [0, 6, 6]
    assert jax.tree.all(jax.tree.map(lambda grad: not grad.any(), reports[0].grads))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"loss": "right"}, {"left": 0.0, "right": 1.0}),
        ({"losses": {"left": 0.5, "right": 2.0}}, {"left": 0.5, "right": 2.0}),
        ({"losses": {"left": optax.linear_schedule(1.0, 0.0, 2), "right": 1.0}}, {"left": 0.5, "right": 1.0}),
    ],
)
def test_an_optimizer_can_minimise_other_losses(settings, weights):
    right = AlternatingOptimizer(optax.sgd(0.1), loss="left" if settings.get("loss") else None)
    program = alternating(left=AlternatingOptimizer(optax.sgd(0.1), **settings), right=right)
    step = jax.jit(program.train_step)
    state, _ = step(program.init(jax.random.key(0), BATCH), BATCH)
    state = state.replace(params=init(jax.random.key(0), BATCH))  # at step 1
    new, report = step(state, BATCH)
    key = jax.random.fold_in(stream(jax.random.fold_in(stream(state.key, "train"), 1), "left"), 0)

    def total(own: Any) -> Any:
        found = losses({**state.params, "left": own}, BATCH, rng=key, train=True)[0]
        return sum(weights[name] * found[name] for name in found)

    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params["left"], jax.grad(total)(state.params["left"]))
    assert_close(new.params["left"], expected, rtol=1e-5)
    assert {"loss/left", "loss/right"} <= report.metrics.by_name.keys()


def test_all_losses_are_evaluated_together_in_both_forms():
    one, per_optimizer = alternating(losses), alternating(one_of)
    state = one.init(jax.random.key(0), BATCH)
    found, same = (program.eval_step(state, BATCH) for program in (one, per_optimizer))
    values = lambda metrics: {name: float(metric.value) for name, metric in metrics.by_name.items()}
    assert values(found) == values(same)
    assert values(found)["loss"] == pytest.approx(values(found)["loss/left"] + values(found)["loss/right"])


def test_parts_of_one_optimizer_are_named_after_it():
    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool, optimizer: str) -> Any:
        w = params[optimizer]["w"]
        return {"fit": (w**2).mean(), "decay": w.sum() ** 2}

    program = alternating(loss, left=AlternatingOptimizer(optax.sgd(0.1), losses={"fit": 1.0, "decay": 0.1}))
    names = program.eval_step(program.init(jax.random.key(0), BATCH), BATCH).by_name
    assert {"loss", "loss/left", "loss/left/fit", "loss/left/decay", "loss/right/decay"} <= names.keys()
    assert float(names["loss/left"].value) == pytest.approx(2.5 + 0.1 * 1.0)


def test_each_optimizer_clips_its_own_gradients():
    state, reports = trained(alternating(left=optax.sgd(1.0), right=optax.sgd(1.0), clip_norm=0.01), 1)
    moved = jax.tree.map(lambda a, b: a - b, state.params, init(jax.random.key(0), BATCH))
    for name in ("left", "right"):
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(moved[name])))
        assert norm == pytest.approx(0.01, rel=1e-3)
        assert float(reports[0].metrics.by_name[f"optimizer/{name}/grad_global_norm"].value) > 0.02


def test_micro_batches_give_the_same_updates():
    quiet = lambda params, batch, *, rng, train: losses(params, batch, rng=jax.random.key(0), train=train)
    (whole, _), (micro, _) = (trained(alternating(quiet, micro_batches=count)) for count in (1, 3))
    assert_close(micro.params, whole.params, rtol=1e-4)


def test_the_model_state_goes_from_one_turn_to_the_next():
    def counting(params: Any, model_state: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
        return losses(params, batch, rng=rng, train=train)[0], ({"calls": model_state["calls"] + 1}, {})

    left, right = AlternatingOptimizer(optax.sgd(0.1), every=2), AlternatingOptimizer(optax.sgd(0.1), steps=3)
    start = lambda key, batch: (init(key, batch), {"calls": jnp.zeros((), jnp.int32)})
    state, _ = trained(stateful_program(start, counting, Optimizers({"left": left, "right": right})), 2)
    assert int(state.model_state["calls"]) == 3 + 3 + 1


def test_averages_and_the_finite_guard_wrap_the_step():
    program = with_finite_guard(with_ema(alternating(), 0.5, warmup=False), max_consecutive=1)
    step = jax.jit(program.train_step)
    start = program.init(jax.random.key(0), BATCH)
    good, _ = step(start, BATCH)
    bad, report = step(good, np.full_like(BATCH, np.nan))
    assert_close(good.extra["ema"], jax.tree.map(lambda a, b: (a + b) / 2, start.params, good.params), rtol=1e-6)
    assert_same_bits((bad.params, bad.opt_state, bad.extra["ema"]), (good.params, good.opt_state, good.extra["ema"]))
    assert float(report.metrics.by_name["guard/skipped"].value) == 1


def test_rules_of_a_layout_may_be_for_the_parameters_of_one_optimizer():
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    layout = Layout(mesh=mesh, param_spec=Partitioning(rules={"left.w": ["fsdp"]}))
    program = compile_program(alternating(), layout=layout, donate=False)
    state = program.init(jax.random.key(0), BATCH)
    placed = program.place(BATCH, stacked=False)
    state, *_ = program.train_step(state, program.train_buffer(state, BATCH, 1), placed)
    assert_close(state.params, trained(alternating(), 1)[0].params, rtol=1e-5)
    assert tuple(state.params["left"]["w"].sharding.spec) == ("fsdp",)


def test_every_parameter_has_one_optimizer():
    for optimizers, match in [
        ({"left": optax.sgd(1.0)}, "no optimizer: right.b, right.w"),
        ({"left": optax.sgd(1.0), "r": optax.sgd(1.0)}, "no optimizer: right.b"),
        ({"left": optax.sgd(1.0), "right": AlternatingOptimizer(optax.sgd(1.0), ".*w")}, "no optimizer: right.b"),
        ({"left": optax.sgd(1.0), "all": AlternatingOptimizer(optax.sgd(1.0), ".*")}, "several optimizers: left.w"),
        ({"both": AlternatingOptimizer(optax.sgd(1.0), "."), "none": optax.sgd(1.0)}, "'none'.*matches no parameter"),
    ]:
        with pytest.raises(ValueError, match=match):
            Optimizers(optimizers).init(init(jax.random.key(0), BATCH))


def test_settings_that_cannot_be_are_refused():
    for make, error, match in [
        (lambda: AlternatingOptimizer(optax.sgd(1.0), every=0), ValueError, "every.*0"),
        (lambda: AlternatingOptimizer(optax.sgd(1.0), steps=1.5), ValueError, "steps.*1.5"),  # type: ignore[arg-type]
        (lambda: AlternatingOptimizer(optax.sgd(1.0), loss="a", losses={"a": 1.0}), ValueError, "`loss` is 'a'"),
        (lambda: Optimizers({}), ValueError, "empty"),
        (lambda: Optimizers({"a": "adam"}), TypeError, "'a'.*str"),
        (lambda: Optimizers({"a/b": optax.sgd(1.0)}), ValueError, "'a/b'"),
        (lambda: alternating(losses={"left": 1.0}), ValueError, "left.*optimizers left, right"),
        (lambda: alternating(left=AlternatingOptimizer(optax.sgd(1.0), joint=True)), ValueError, "joint.*right: None"),
        (
            lambda: Optimizers({"a": AlternatingOptimizer(optax.sgd(1.0), every=2, joint=True)}),
            ValueError,
            "'a'.*every",
        ),
    ]:
        with pytest.raises(error, match=match):
            make()


def test_losses_and_optimizers_that_do_not_agree_are_errors():
    for returned, match in [
        (lambda found: {"left": found["left"]}, "returned the losses left, but.*left, right"),
        (lambda found: {**found, "other": found["left"]}, "left, right, other, but.*left, right"),
    ]:
        of = lambda returned, params, batch, *, rng, train: returned(losses(params, batch, rng=rng, train=train)[0])
        loss = partial(of, returned)
        program = alternating(loss)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(program.train_step, program.init(jax.random.key(0), BATCH), BATCH)


def one_loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    found, metrics = losses(params, batch, rng=rng, train=train)
    return found["left"] + found["right"], metrics


def partitioned(clip: float | None) -> optax.GradientTransformation:
    labels = lambda params: {name: dict.fromkeys(part, name) for name, part in params.items()}
    tx = optax.partition({"left": optax.sgd(0.1, momentum=0.9), "right": optax.adam(0.05)}, labels)
    return tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)


def test_optimizers_of_one_loss_are_a_partition_of_optax_to_the_bit():
    for clip in [None, 0.1]:
        for precision in ["f32", "f16"]:
            for named in [False, True]:
                loss = (lambda *args, **more: ({"all": one_loss(*args, **more)[0]}, {})) if named else one_loss
                own: dict[str, Any] = {"loss": "all"} if named else {}
                optimizers = {
                    "left": AlternatingOptimizer(optax.sgd(0.1, momentum=0.9), **own),
                    "right": AlternatingOptimizer(optax.adam(0.05), **own),
                }
                program = function_program(init, loss, Optimizers(optimizers), precision=precision, clip_norm=clip)
                expected = function_program(init, one_loss, partitioned(clip), precision=precision)
                (state, reports), (other, other_reports) = trained(program), trained(expected)
                assert_same_bits(state.params, other.params)
                assert_same_bits(*(found[-1].metrics.by_name["loss"].value for found in (reports, other_reports)))
                assert_same_bits(*(one.eval_step(state, BATCH).by_name["loss"].value for one in (program, expected)))


def test_without_joint_the_optimizers_of_one_loss_take_turns():
    turns = {name: AlternatingOptimizer(optax.sgd(0.1), joint=False) for name in ("left", "right")}
    at_once = {name: optax.sgd(0.1) for name in turns}
    quiet = lambda params, batch, *, rng, train: one_loss(params, batch, rng=jax.random.key(0), train=train)
    (state, _), (other, _) = (trained(function_program(init, quiet, Optimizers(one)), 1) for one in (turns, at_once))
    assert_same_bits(state.params["left"], other.params["left"])
    assert not np.array_equal(state.params["right"]["w"], other.params["right"]["w"])


def test_a_custom_step_updates_all_of_them_only_if_they_have_one_loss():
    params = init(jax.random.key(0), BATCH)
    joint, partition = Optimizers({"left": optax.sgd(0.1, momentum=0.9), "right": optax.adam(0.05)}), partitioned(None)
    assert_same_bits(*(tx.update(params, tx.init(params), params)[0] for tx in (joint, partition)))
    tx = Optimizers({"left": optax.sgd(1.0), "right": AlternatingOptimizer(optax.sgd(1.0), every=2)})
    params = init(jax.random.key(0), BATCH)
    with pytest.raises(TypeError, match="different losses"):
        tx.update(params, tx.init(params), params)
