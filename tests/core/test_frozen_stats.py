"""Frozen modules keep their BatchNorm statistics, however they were frozen."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import TrainState, fit
from jax_trainer.callbacks import UnfreezeConfig
from jax_trainer.core import LoRA
from jax_trainer.optimizer import SGDConfig

X = np.random.default_rng(0).normal(2, 3, size=(32, 4)).astype(np.float32)
Y = X[:, 0]


class Linen(nn.Module):
    affine: bool = True

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dense(4, name="body")(x)
        x = nn.BatchNorm(use_running_average=not train, use_scale=self.affine, use_bias=self.affine, name="norm")(x)
        x = nn.BatchNorm(use_running_average=not train, name="own")(x)
        return nn.Dense(1, name="head")(x)[:, 0]


class Nnx(nnx.Module):
    def __init__(self, affine: bool = True) -> None:
        rngs = nnx.Rngs(0)
        self.body, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, use_scale=affine, use_bias=affine, rngs=rngs)
        self.own = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.own(self.norm(self.body(x))))[:, 0]


def square(outputs: Any, targets: Any) -> Any:
    return (outputs - targets) ** 2


def statistics(folder: Any, model: Any, **options: Any) -> dict[str, bool]:
    """Whether the statistics of each BatchNorm have moved."""
    shared = {"log_dir": folder, "progress": False, "tensorboard": False, "save": False, "num_epochs": 1}
    options = {"optimizer": optax.sgd(1e-3), **shared, **options}
    state = fit(model, (X, Y), loss_fn=square, batch_size=16, **options).state.model_state
    found = state.get("batch_stats", state)
    return {name: bool(np.abs(np.asarray(found[name]["mean"])).max() > 0) for name in ("norm", "own")}


FROZEN = "(body|norm).*"
WAYS = {
    "freeze": lambda **more: {"optimizer": SGDConfig(learning_rate=1e-3, freeze=FROZEN, **more)},
    "Unfreeze": lambda **more: {"callbacks": [UnfreezeConfig(schedule={0: "(own|head).*", 1: ".*"}, **more)]},
    "LoRA": lambda **more: {"lora": LoRA(match="body.kernel", rank=1, train="(own|head).*", **more)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [Linen, Nnx])
def test_a_frozen_batch_norm_keeps_its_statistics_and_another_does_not(tmp_path, model, way):
    assert statistics(tmp_path, model(), **WAYS[way]()) == {"norm": False, "own": True}
    assert statistics(tmp_path, model(), **WAYS[way](train_bn=True)) == {"norm": True, "own": True}


@pytest.mark.parametrize("way", ["Unfreeze", "LoRA"])
def test_a_frozen_batch_norm_of_a_flax_state_keeps_its_statistics(tmp_path, way):
    model = Linen()
    made = TrainState.create(apply_fn=model.apply, tx=optax.sgd(1e-3), **model.init(jax.random.key(0), X[:2]))
    assert statistics(tmp_path, made, **{**WAYS[way](), "optimizer": None}) == {"norm": False, "own": True}


def test_without_freezing_all_statistics_move(tmp_path):
    assert statistics(tmp_path, Nnx()) == {"norm": True, "own": True}


def test_a_batch_norm_without_parameters_belongs_to_the_module_around_it(tmp_path):
    # the model itself, which trains
    assert statistics(tmp_path, Linen(affine=False), **WAYS["freeze"]()) == {"norm": True, "own": True}


def test_statistics_move_as_soon_as_their_module_is_unfrozen(tmp_path):
    schedule = UnfreezeConfig(schedule={0: "(own|head).*", 1: ".*"})
    assert statistics(tmp_path, Nnx(), callbacks=[schedule], num_epochs=2) == {"norm": True, "own": True}


# parameters that LoRA trains itself


def lora_of(train: str) -> LoRA:
    return LoRA(match="body.kernel", rank=1, train=train)


def test_a_head_that_lora_trains_moves_and_the_base_does_not(tmp_path):
    shared = {
        "log_dir": tmp_path,
        "progress": False,
        "tensorboard": False,
        "num_epochs": 1,
        "optimizer": optax.sgd(0.01),
    }
    before = nnx.to_pure_dict(nnx.state(Nnx(), nnx.Param))
    result = fit(Nnx(), (X, Y), loss_fn=square, lora=lora_of("head.*"), **shared)
    after = nnx.to_pure_dict(nnx.state(result.model, nnx.Param))
    moved = {
        name
        for name in before
        if any(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), before[name], after[name])))
    }
    assert moved == {"body", "head"}
    assert set(result.state.params) == {"body.kernel", "head.kernel", "head.bias"}
    shared["num_epochs"] = 2
    longer = fit(Nnx(), (X, Y), loss_fn=square, lora=lora_of("head.*"), resume=result.folder, **shared)
    straight = fit(Nnx(), (X, Y), loss_fn=square, lora=lora_of("head.*"), **shared)
    jax.tree.map(np.testing.assert_array_equal, longer.state.params, straight.state.params)


@pytest.mark.parametrize(
    ("train", "named"), [("classifier.*", "classifier.*head"), ("body.*", "both match body.kernel")]
)
def test_a_pattern_that_cannot_be_trained_is_refused(tmp_path, train, named):
    with pytest.raises(ValueError, match=named):
        statistics(tmp_path, Nnx(), lora=lora_of(train))
