from typing import Any

import jax
import numpy as np
import pytest
from compoconf import parse_config

from jax_trainer.adapters import BaseModelNNX
from jax_trainer.adapters.interfaces import model_mode
from jax_trainer.config.settings import SettingsError
from jax_trainer.models import (
    SimpleClassifier,
    SimpleClassifierConfig,
    SimpleClassifierLinen,
    SimpleClassifierLinenConfig,
)
from tests.rows import each

IMAGES = np.random.default_rng(0).normal(size=(16, 4, 4, 3)).astype(np.float32)


def test_the_section_of_the_introduction_builds_it(outline, parameters):
    section = {"class_name": "SimpleClassifier", "c_hid": 32, "num_classes": 10, "act_fn": "gelu", "batch_norm": True}
    config: Any = parse_config(BaseModelNNX.cfgtype, section)
    assert config == SimpleClassifierConfig()
    model = outline(config, (1, 32, 32, 3))
    assert isinstance(model, SimpleClassifier)
    assert parameters(model) == (32 * 32 * 3 + 1) * 32 + 2 * 32 + (32 + 1) * 10


@pytest.mark.parametrize("batch_norm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_linen_and_nnx_compute_the_same_in_training_and_in_evaluation(batch_norm: bool, filled, call):
    keys: dict[str, Any] = {"c_hid": 8, "num_classes": 5, "act_fn": "relu", "batch_norm": batch_norm}
    model = filled(SimpleClassifierConfig(**keys), IMAGES.shape)
    layers = {"hidden": model.hidden.linear, "out": model.out}
    params = {name: {"kernel": layer.kernel[...], "bias": layer.bias[...]} for name, layer in layers.items()}
    stats = {}
    if batch_norm:
        norm = model.hidden.norm
        params["norm"] = {"scale": norm.scale[...], "bias": norm.bias[...]}
        stats = {"batch_stats": {"norm": {"mean": norm.mean[...], "var": norm.var[...]}}}

    linen: Any = SimpleClassifierLinen(SimpleClassifierLinenConfig(**keys))
    apply = jax.jit(linen.apply, static_argnames=("train", "mutable"))
    trained, changed = apply({"params": params, **stats}, IMAGES, train=True, mutable=("batch_stats",))
    assert trained.shape == (16, 5)
    np.testing.assert_allclose(call(model, IMAGES), trained, atol=1e-5)
    model.eval()
    np.testing.assert_allclose(call(model, IMAGES), apply({"params": params, **changed}, IMAGES), atol=1e-5)


def test_both_modes_can_be_configured():
    assert [model_mode(config()) for config in (SimpleClassifierConfig, SimpleClassifierLinenConfig)] == [
        "nnx",
        "linen",
    ]


@each("keys", [{"c_hid": 0}, {"num_classes": 0}, {"act_fn": "softplus"}, {"batch_norm": "yes"}])
@each("config", [SimpleClassifierConfig, SimpleClassifierLinenConfig])
def test_a_value_out_of_bounds_is_refused(config: type, keys: dict[str, Any]):
    with pytest.raises(SettingsError, match=rf"`{next(iter(keys))}` must be"):
        config(**keys)
