"""Several losses and several optimizers mean the same in every style: the same bits, also after a failure."""

import logging
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import fit, train_fn
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.core.optimizers import AlternatingOptimizer
from jax_trainer.optimizer import LinearScheduleConfig
from jax_trainer.testing import assert_same_bits, fault
from tests.styles.style_runs import EPOCHS, SEED, STEPS, STYLES, TOTAL, Style, cross_entropy, train_data, val_data

pytestmark = pytest.mark.usefixtures("quiet_log")
RAMP = LinearScheduleConfig(init_value=0.0, end_value=0.5)
SGD = optax.sgd(0.1)
WEIGHTED = {"losses": {"ce": 1.0, "small": RAMP}, "accumulate": 2}


@pytest.fixture(autouse=True)
def quiet_log(caplog):
    caplog.set_level(logging.ERROR, "jax_trainer")


class LinenPair(nn.Module):
    """Two heads, each of which has its own optimizer."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> tuple[jax.Array, jax.Array]:
        kernel: dict[str, Any] = {"kernel_init": nn.initializers.ones}
        hidden = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(3, name="left", **kernel)(hidden), nn.Dense(3, name="right", **kernel)(x)


class NnxPair(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.left, self.right = (nnx.Linear(6, 3, kernel_init=nnx.initializers.ones, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.left(self.dropout(x)), self.right(x)


def small(logits: jax.Array) -> jax.Array:
    return (logits**2).mean()


def two_losses(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    return {"ce": cross_entropy(logits, labels), "small": small(logits)}


def rivals(outputs: Any, labels: jax.Array) -> dict[str, jax.Array]:
    """Each head learns the labels, and the second one also to differ from the first."""
    left, right = outputs
    apart = -small(left - right) * 0.01
    return {"left": cross_entropy(left + right, labels), "right": cross_entropy(right, labels) + apart}


class Weighted:
    """A training with two losses, one of whose weights changes."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, two_losses, options=WEIGHTED, linear=True)  # type: ignore[call-arg]


class Alternating:
    """A training with two optimizers, each with a cadence of its own."""

    flavour: str

    def __init__(self, folder: Any) -> None:
        super().__init__(folder, rivals, options={"clip_norm": 0.5})  # type: ignore[call-arg]

    def model(self) -> Any:
        return LinenPair() if self.flavour == "linen" else NnxPair(nnx.Rngs(0))

    def optimizer(self) -> Any:
        rate = optax.cosine_decay_schedule(0.1, TOTAL)
        return {
            "right": AlternatingOptimizer(optax.adam(0.02), steps=2),
            "left": AlternatingOptimizer(optax.sgd(rate, momentum=0.9), every=2),
        }


class Joint(Alternating):
    """A training with two optimizers of one loss, as `optax.partition` has them."""

    def __init__(self, folder: Any) -> None:
        both = lambda outputs, labels: cross_entropy(outputs[0] + outputs[1], labels)
        super(Alternating, self).__init__(folder, both, options={"clip_norm": 0.5})  # type: ignore[call-arg]

    def optimizer(self) -> Any:
        return {"right": optax.adam(0.02), "left": optax.sgd(0.1, momentum=0.9)}


KINDS: dict[str, type[Any]] = {"losses": Weighted, "optimizers": Alternating, "one loss": Joint}


def style(kind: str, name: str) -> type[Style]:
    return type(f"{kind} {name}", (KINDS[kind], STYLES[name]), {})


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What a style comes to, trained once."""
    return cache(lambda kind, name: style(kind, name)(tmp_path_factory.mktemp("several")).train())


USUAL = {
    "losses": ("fit, linen", "TrainLoop"),
    "optimizers": ("fit, nnx", "train_fn", "TrainLoop"),
    "one loss": ("train_fn", "TrainLoop"),
}
CASES = [
    pytest.param(kind, name, marks=() if name in USUAL[kind] else pytest.mark.slow)
    for kind in KINDS
    for name in STYLES
    if not name.startswith("TrainerModule") and (kind, name) != ("losses", "train_fn")  # whose step weighs its losses
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_style_comes_to_the_same_bits(outcome, kind, name):
    mine, other = (outcome(kind, one) for one in (name, f"TrainerModule, {STYLES[name].flavour}"))
    assert_same_bits((mine.params, mine.model_state), (other.params, other.model_state))
    if (kind, name) != ("losses", "TrainLoop"):  # whose evaluation has metrics of its own, and no weights
        assert mine.history == other.history


SLOW = [pytest.param(*case.values, marks=pytest.mark.slow) for case in CASES]
RESUMED = [pytest.param("optimizers", "fit, nnx"), *SLOW]


@pytest.mark.parametrize(("kind", "name"), RESUMED)
def test_every_style_resumes_after_a_failure_to_the_same_bits(outcome, kind, name, tmp_path):
    made = style(kind, name)
    with fault(f"step:raise:{STEPS + 2}"), pytest.raises(FaultInjected):
        made(tmp_path).train()
    resumed, through = made(tmp_path).train(resume=True), outcome(kind, name)
    assert_same_bits((resumed.params, resumed.model_state), (through.params, through.model_state))


def test_a_function_for_each_optimizer_is_the_same_as_one_for_all(outcome, tmp_path):
    made: Any = style("optimizers", "fit, nnx")(tmp_path)

    def of(name: str) -> Any:
        return lambda logits, labels: rivals(logits, labels)[name]

    options: dict[str, Any] = {"log_dir": str(tmp_path), "tensorboard": False, "progress": False, "seed": SEED}
    result = fit(
        made.model(),
        train_data(),
        val_data(),
        loss_fn={"left": of("left"), "right": of("right")},
        optimizer=made.optimizer(),
        num_epochs=EPOCHS,
        **made.options,
        **options,
    )
    assert_same_bits(result.state.params, outcome("optimizers", "fit, nnx").params)
    assert {"train/loss/left", "val/loss/right", "val/loss"} <= result.history[EPOCHS].keys()


def test_a_step_with_its_own_gradients_weighs_its_losses_itself():
    steps: Any = {"n_steps": 1, "eval_every_n_steps": 1, "n_eval_batches": 1}
    with pytest.raises(TypeError, match="losses.*own gradients"):
        train_fn(fns=(lambda *_: None, lambda *_: None), **WEIGHTED, **steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "match"),
    [
        ({"left": cross_entropy}, {"left": SGD, "right": SGD}, "functions for left, .*left, right"),
        ({"left": cross_entropy}, SGD, "one optimizer"),
        (rivals, {"left": SGD}, "no optimizer: right.bias, right.kernel"),
    ],
)
def test_losses_and_optimizers_of_fit_must_agree(loss_fn, optimizer, match, tmp_path):
    data = (jnp.ones((4, 6)), jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match=match):
        fit(NnxPair(nnx.Rngs(0)), data, loss_fn=loss_fn, optimizer=optimizer, log_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())
