import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.diagnostics.leaves import STATISTICS, check_modes, leaf_statistics

TREE = {
    "layers": [{"w": np.array([[1.0, -2.0], [4.0, 0.5]], np.float32)}],
    "scale": np.array([3.0], np.float32),
    "half": jnp.arange(300, dtype=jnp.bfloat16),
    "count": np.arange(3),
    "none": np.zeros((0, 2), np.float32),
}


def numbers(modes, tree=TREE) -> dict[str, float]:
    return {name: float(entry["value"]) for name, entry in leaf_statistics("param", tree, modes).items()}


def test_the_numbers_of_every_float_leaf_are_those_of_numpy():
    w, half = TREE["layers"][0]["w"], np.asarray(TREE["half"]).astype(np.float64)
    found = numbers(("min", "max", "mean", "std"), {**TREE, "scale": np.arange(2)})
    expected = {
        f"param/{path}_{mode}": getattr(leaf, mode)()
        for path, leaf in {"layers.0.w": w, "half": half}.items()
        for mode in ("min", "max", "mean", "std")
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_leaf_with_one_element_has_val_only():
    assert numbers(STATISTICS)["param/scale_val"] == 3
    assert [name for name in numbers(STATISTICS) if "scale" in name] == ["param/scale_val"]
    assert {name for name in numbers(("mean", "max")) if "scale" in name} == {"param/scale_mean", "param/scale_max"}
    assert set(numbers(("val",))) == {"param/scale_val"}


def test_numbers_are_computed_in_float32_and_reported_in_training():
    for name, entry in leaf_statistics("grad", TREE, STATISTICS).items():
        assert entry["value"].dtype == jnp.float32
        assert entry["log_mode"] == "train"
        assert entry["mode"] == {"min": "min", "max": "max"}.get(name.rsplit("_", 1)[1], "mean")


def test_a_bare_array_needs_no_path():
    assert numbers(("max",), np.ones(3, np.float32)) == {"param/max": 1}


def test_non_finite_values_show():
    found = numbers(("min", "std"), {"w": np.array([1.0, np.nan], np.float32)})
    assert np.isnan(list(found.values())).all()


def test_statistics_have_no_gradient():
    def loss(w):
        metrics = leaf_statistics("intermediate", {"w": w**2}, ("mean",))
        return w.sum() + metrics["intermediate/w_mean"]["value"]

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(3)), np.ones(3))


def test_without_modes_nothing_is_logged():
    assert leaf_statistics("param", TREE, ()) == {}


def test_unknown_modes_are_an_error_that_names_the_choices():
    with pytest.raises(ValueError, match=r"`grads`.*'median'.*min, max, mean, std, val"):
        check_modes("grads", ("mean", "median"))
    with pytest.raises(TypeError, match=r"`grads`.*'mean'.*`grads=\('mean',\)`"):
        check_modes("grads", "mean")
