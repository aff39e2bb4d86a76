"""LoRA means the same in every style, and resumes exactly from checkpoints without the base."""

import logging
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_trainer import TrainLoop, TrainTask, fit, train_fn
from jax_trainer.checkpoint.record import read_saved
from jax_trainer.checkpoint.restore import stored_in
from jax_trainer.checkpoint.store import CheckpointError
from jax_trainer.core import LoRA, digest_of
from jax_trainer.runs import OtherRunError
from jax_trainer.testing import assert_same_bits
from tests.styles.style_runs import SEED, STYLES, InterruptedData, arrays, cross_entropy, optimizer, train_data

OPTIONS = {"lora": LoRA(match=".*kernel", rank=2, dropout=0.1)}
TOGETHER = {**OPTIONS, "precision": "bf16", "accumulate": 2, "clip_norm": 0.05, "ema": 0.9, "on_nonfinite": "skip"}
DORA = {"lora": LoRA(match=".*kernel", rank=2, dropout=0.1, use_dora=True)}
ALL = [name for name in STYLES if name != "train_fn"]


def cases(*usual: str) -> list:
    return [pytest.param(name, marks=() if name in usual else pytest.mark.slow) for name in ALL]


@pytest.fixture(autouse=True)
def quiet_log(caplog):
    caplog.set_level(logging.ERROR, "jax_trainer")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What a style comes to, trained once."""
    found = {}

    def train(name, options=OPTIONS, linear=True):
        key = (name, [OPTIONS, TOGETHER, DORA].index(options), linear)
        if key not in found:
            style = STYLES[name](tmp_path_factory.mktemp("lora"), options=options, linear=linear)
            found[key] = style.train(), style
        return found[key]

    return train


@pytest.mark.parametrize("name", cases("fit, linen", "TrainLoop"))
def test_lora_gives_the_same_bits_in_every_style(outcomes, name):
    (mine, _), (other, _) = (outcomes(one) for one in (name, f"TrainerModule, {STYLES[name].flavour}"))
    assert_same_bits(mine.params, other.params)
    assert mine.history == pytest.approx(other.history, rel=1e-5)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(mine.params))  # the line starts from zeros


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_it_goes_with_every_other_option(outcomes, name):
    (mine, _), (other, _) = (outcomes(one, TOGETHER, False) for one in (name, f"TrainerModule, {STYLES[name].flavour}"))
    assert_same_bits((mine.params, mine.model_state), (other.params, other.model_state))


@pytest.mark.parametrize("name", ["fit, linen", pytest.param("fit, nnx", marks=pytest.mark.slow)])
def test_a_checkpoint_has_the_adapters_and_the_digest_of_the_base(outcomes, name):
    _, style = outcomes(name)
    for path in style.checkpoints:
        record = read_saved(path)[1]
        names = [one for one in stored_in(path, record) if one.startswith(("params.", "frozen."))]
        assert names and all(one.endswith(("kernel.a", "kernel.b")) for one in names)
        assert len(record.frozen) == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_dora_gives_the_same_bits_in_every_style(outcomes, name):
    (mine, _), (other, _) = (outcomes(one, DORA, False) for one in (name, f"TrainerModule, {STYLES[name].flavour}"))
    assert_same_bits(mine.params, other.params)
    without = outcomes(name, OPTIONS, False)[0].params
    assert any(np.any(one != two) for one, two in zip(*map(jax.tree.leaves, (mine.params, without)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS, DORA], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("name", ALL)
def test_a_run_that_is_interrupted_resumes_exactly(outcomes, tmp_path, name, options):
    whole, _ = outcomes(name, options, False)
    with pytest.raises(KeyboardInterrupt):
        STYLES[name](tmp_path, options=options).train(InterruptedData(tmp_path))
    resumed = STYLES[name](tmp_path, options=options).train(resume=True)
    assert_same_bits((resumed.params, resumed.model_state), (whole.params, whole.model_state))


def test_another_base_is_refused(tmp_path):
    def train(weights: float, resume: bool, allow: tuple[str, ...] = ()) -> None:
        model = {"w": np.full((6, 3), weights, np.float32)}
        fit(
            Model(model), train_data(), loss_fn=cross_entropy, optimizer=optimizer(), num_epochs=1 + resume,
            log_dir=tmp_path, resume=str(next(tmp_path.glob("fit/*"))) if resume else False, tensorboard=False,
            progress=False, lora=LoRA(match=".*w", rank=1), allow_changes=allow,
        )  # fmt: skip

    train(1.0, resume=False)
    train(1.0, resume=True)
    with pytest.raises(OtherRunError, match="initial weights"):
        train(2.0, resume=True)
    with pytest.raises(CheckpointError, match=r"a base with the digest \w{32}.*`trainer.init_from`"):
        train(2.0, resume=True, allow=("start",))


@jax.tree_util.register_pytree_node_class
class Model:
    """A callable pytree with its weights."""

    def __init__(self, params):
        self.params = params

    def __call__(self, x):
        return x @ self.params["w"]

    def tree_flatten(self):
        return (self.params,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_loop_continues_from_a_checkpoint_in_memory():
    def loop(init):
        task = TrainTask(lambda v, x: x @ v["params"]["w"], optimizer(), cross_entropy, [arrays(16)])
        steps: dict[str, Any] = {"n_steps": 4, "n_steps_per_checkpoint": 2}
        return TrainLoop(init, task, jax.random.key(SEED), **steps, stdout=False, lora=LoRA(match="w", rank=2))

    first, last = loop(lambda rngs, x: {"params": {"w": np.ones((6, 3), np.float32)}})
    (again,) = loop(first)
    assert_same_bits(again.model_params, last.model_params)
    assert digest_of(again.frozen) == digest_of(last.frozen)


def test_a_step_with_its_own_gradients_refuses_it(tmp_path):
    with pytest.raises(TypeError, match="`train_fn`.*`lora`.*`fit`.*`nnx.LoRALinear`"):
        STYLES["train_fn"](tmp_path, options=OPTIONS, linear=True).train()


def test_a_step_with_its_own_gradients_trains_the_adapters_of_layers_that_have_them_and_nothing_else():
    model = nnx.LoRALinear(6, 3, lora_rank=2, rngs=nnx.Rngs(0))
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1]).mean()
    gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    steps: dict[str, Any] = {"n_steps": 2, "eval_every_n_steps": 2, "n_eval_batches": 1}
    fns = (lambda model, rng_key, batch: gradients(model, batch), lambda model, rng_key, batch: loss(model, batch))
    train = train_fn(fns=fns, **steps, progress=False)
    train(jax.random.key(0), model, nnx.Optimizer(model, optimizer(), wrt=nnx.LoRAParam), [arrays(16)] * 2)
    after = nnx.to_pure_dict(nnx.state(model))
    assert_same_bits((after["kernel"], after["bias"]), (before["kernel"], before["bias"]))
    assert np.any(after["lora"]["lora_b"] != before["lora"]["lora_b"])
