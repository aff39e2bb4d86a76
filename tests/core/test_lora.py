"""LoRA: the same products as with merged weights, in whatever way a function uses its parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jax_trainer.adapters import function_program
from jax_trainer.core import LoRA, Precision, compile_program, digest_of, model_params, weights_of, with_base
from jax_trainer.core.lora import Adapting
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.sharding.layout import Layout
from jax_trainer.sharding.mesh import make_mesh
from jax_trainer.testing import assert_same_bits

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
TOKENS = np.array([[1, 2, 3, 1]])


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def activated(x: Any) -> Any:
    return jnp.maximum(x, 0)  # has the same bits in every fusion; since jax 0.12, `tanh` on a CPU has not


def of_layers(w: Any, x: Any) -> Any:
    return lax.scan(lambda x, kernel: (activated(x @ kernel), None), x, w)[0]


def tied(w: Any, tokens: Any) -> Any:
    return jnp.take(w, tokens, axis=0) @ w.T


def convolved(w: Any, x: Any) -> Any:
    return lax.conv_general_dilated(x[..., None], w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


USES: dict[str, tuple[tuple[int, ...], Callable[..., Any], Any]] = {
    "a product": ((6, 5), lambda w, x: x @ w, X),
    "transposed": ((5, 6), lambda w, x: x @ w.T, X),
    "on the left": ((5, 6), lambda w, x: w @ x.T, X),
    "in both directions": ((6, 5), lambda w, x: (x @ w) @ w.T, X),
    "cast": ((6, 5), lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), X),
    "into heads": ((6, 2, 3), lambda w, x: jnp.einsum("bd,dhk->bhk", x, w), X),
    "out of heads": ((2, 3, 5), lambda w, x: jnp.einsum("bhk,hkd->bd", x.reshape(4, 2, 3), w), X),
    "heads in another order": ((3, 2, 5), lambda w, x: jnp.einsum("bhk,khd->bd", x.reshape(4, 2, 3), w), X),
    "in a function of its own": ((6, 5), jax.jit(lambda w, x: x @ w), X),
    "rematerialised": ((6, 5), jax.checkpoint(lambda w, x: activated(x @ w)), X),
    "stacked layers": ((3, 6, 6), of_layers, X),
    "stacked layers, rematerialised": ((3, 6, 6), jax.checkpoint(of_layers), X),
    "in each step of a loop": ((6, 6), lambda w, x: lax.scan(lambda x, _: (x @ w, None), x, None, length=2)[0], X),
    "in a branch": ((6, 6), lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), X),
    "experts": ((2, 6, 5), lambda w, x: jnp.einsum("ebd,edh->ebh", jnp.stack([x, x]), w), X),
    "a lookup": ((6, 5), lambda w, tokens: jnp.take(w, tokens, axis=0), TOKENS),
    "tied embeddings": ((6, 5), tied, TOKENS),
    "a convolution": ((2, 1, 5), convolved, X),
    "a norm": ((6, 5), lambda w, x: jnp.linalg.norm(w) * x, X),
}
USUAL = ("in both directions", "into heads", "stacked layers, rematerialised", "in a branch", "tied embeddings")
CASES = [pytest.param(use, marks=() if use in USUAL else pytest.mark.slow) for use in USES]
NOT_PRODUCTS = ("experts", "a lookup", "tied embeddings", "a convolution", "a norm")


def adapted(use: str, **options: Any) -> tuple[Any, Any, Any, Callable[..., Any]]:
    """New adapters of `w`, the base, the function of its parameters, and that of its adapters."""
    shape, function, x = USES[use]
    call = lambda params, model_state, batch, rng, *, train: function(params["w"], batch)
    adapting = Adapting(LoRA(match="w", rank=1, **options), call, Precision())
    params, key = {"w": drawn(*shape), "other": jnp.zeros(3)}, jax.random.key(0)
    adapting.trace(params, {}, x, key)
    adapters, frozen = adapting.split(key, params)

    def apply(adapters: Any, train: bool = False, key: jax.Array = key, frozen: Any = frozen, x: Any = x) -> Any:
        return adapting.applied(call, frozen)(adapters, {}, x, key, train=train)

    return adapters, frozen, lambda params, x=x: function(params["w"], x), apply


def start(apply: Callable[..., Any], adapters: Any, frozen: Any, use: str, *, train: bool = False) -> Any:
    """The result before training; base and input are arguments, because constants are folded in another way."""
    return jax.jit(lambda a, f, x: apply(a, train=train, frozen=f, x=x))(adapters, frozen, USES[use][2])


@pytest.mark.parametrize("use", CASES)
def test_lora_starts_as_the_base_and_computes_as_merged_weights(use):
    adapters, frozen, plain, apply = adapted(use)
    base = jax.jit(plain)(frozen.params, USES[use][2])
    assert_same_bits(start(apply, adapters, frozen, use), base)
    assert_computes_as_merged(use, adapters, frozen, plain, apply, base)


USUAL_OF_DORA = ("stacked layers, rematerialised", "tied embeddings")


@pytest.mark.parametrize(
    "use", [pytest.param(one, marks=() if one in USUAL_OF_DORA else pytest.mark.slow) for one in USES]
)
def test_dora_starts_close_to_the_base_and_computes_as_merged_weights(use):
    adapters, frozen, plain, apply = adapted(use, use_dora=True)
    base = jax.jit(plain)(frozen.params, USES[use][2])
    first = np.asarray(start(apply, adapters, frozen, use), np.float32)
    assert np.abs(first - base).max() <= (0.03 if use == "cast" else 1e-6) * np.abs(base).max()
    assert_computes_as_merged(use, adapters, frozen, plain, apply, base)


def assert_computes_as_merged(use: str, adapters: Any, frozen: Any, plain: Any, apply: Any, base: Any) -> None:

    @jax.jit
    def both(adapters: Any, frozen: Any, x: Any) -> Any:
        """The results and the gradients with adapters, and with merged weights."""
        ours = lambda adapters: apply(adapters, frozen=frozen, x=x).astype(jnp.float32)
        theirs = lambda adapters: plain(frozen.merged(adapters), x).astype(jnp.float32)
        return [(one(adapters), jax.grad(lambda a, one=one: jnp.cos(one(a)).sum())(adapters)) for one in (ours, theirs)]

    trained = jax.tree.map(lambda leaf: np.asarray(leaf) + drawn(*leaf.shape) / 8, adapters)
    (ours, gradients), (theirs, of_merged) = both(trained, frozen, USES[use][2])
    assert np.abs(ours - base).max() > 1e-3
    tolerance = 0.03 if use == "cast" else 1e-6
    assert np.abs(ours - theirs).max() <= tolerance * max(1, np.abs(theirs).max())
    for one, other in zip(*map(jax.tree.leaves, (gradients, of_merged)), strict=True):
        np.testing.assert_allclose(one, other, rtol=20 * tolerance, atol=20 * tolerance)


def test_dora_trains_the_norm_of_each_output_and_an_output_of_zeros_starts_as_such():
    compiled = program(use_dora=True, **LORA)
    state, after = compiled.init(jax.random.key(0), X), trained(compiled)
    kernel = np.asarray(state.frozen.params["layer"]["kernel"])
    np.testing.assert_allclose(state.params["layer.kernel"].magnitude, np.linalg.norm(kernel, axis=0), rtol=1e-6)
    merged = np.asarray(model_params(after)["layer"]["kernel"])
    np.testing.assert_allclose(np.linalg.norm(merged, axis=0), after.params["layer.kernel"].magnitude, rtol=1e-5)
    assert np.all(after.params["layer.kernel"].magnitude != state.params["layer.kernel"].magnitude)
    other = state.replace(params=jax.tree.map(lambda leaf: leaf * np.r_[0, 1, 1, 1], state.frozen.params), frozen={})
    started = with_base(state.replace(extra={"ema": state.params}), other)
    assert started.params["layer.kernel"].magnitude[0] == 0
    assert_same_bits(started.extra["ema"], started.params)
    assert np.isfinite(model_params(started)["layer"]["kernel"]).all()


def test_the_first_pattern_that_matches_gives_the_rank_and_alpha():
    lora = LoRA(match=".*", rank=4, alpha=8.0, rank_pattern={"a.*": 2}, alpha_pattern={"a.b": 6.0, "a.*": 1.0})
    assert [lora.scale_of(path) for path in ("a.b", "a.c", "c")] == [3.0, 0.5, 2.0]


def test_stacked_layers_have_an_adapter_each():
    assert {name: adapted(name)[0]["w"].a.shape for name in ("stacked layers", "out of heads", "a lookup")} == {
        "stacked layers": (3, 6, 1),
        "out of heads": (6, 1),
        "a lookup": (6, 1),
    }


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(use, marks=() if use == "stacked layers, rematerialised" else pytest.mark.slow)
        for use in USES
        if use not in (*NOT_PRODUCTS, "in a branch")
    ],
)
def test_dropout_is_of_training_only_and_depends_on_the_key(use):
    adapters, frozen, plain, apply = adapted(use, dropout=0.5)
    first = start(apply, adapters, frozen, use, train=True)  # B is 0
    assert_same_bits(first, jax.jit(plain)(frozen.params, USES[use][2]))
    trained = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.05, adapters)
    apply = jax.jit(apply, static_argnums=1)
    one, again, other = (apply(trained, True, jax.random.key(seed)) for seed in (1, 1, 2))
    assert_same_bits(one, again)
    assert np.any(one != other) and np.any(one != apply(trained))
    assert_same_bits(apply(trained, False, jax.random.key(1)), apply(trained, False, jax.random.key(2)))


def test_dropout_of_what_is_not_a_product_is_an_error():
    for use in NOT_PRODUCTS:
        with pytest.raises(ValueError, match="selects w,.*`lora.dropout`"):
            adapted(use, dropout=0.1)


def test_each_layer_of_a_scan_drops_other_inputs():
    def summed(w: Any, x: Any) -> Any:
        return lax.scan(lambda total, kernel: (total, x @ kernel), 0.0, w)[1]

    USES["layers of the same input"] = ((3, 6, 6), summed, np.ones((4, 6), np.float32))
    adapters, frozen, _, apply = adapted("layers of the same input", dropout=0.5)
    ones = jax.tree.map(np.ones_like, adapters)
    first, second, third = apply(ones, train=True) - summed(frozen.params["w"], np.ones((4, 6), np.float32))
    assert np.abs(first - second).max() > 1 and np.abs(second - third).max() > 1


def test_a_parameter_that_cannot_be_adapted_is_an_error_that_names_it():
    for options, fault in [
        ({"match": ".*kernels"}, "'.*kernels' matches no parameter.*layer.kernel"),
        ({"match": "layer.kernel", "train": "bias"}, "'bias' matches no parameter.*full path.*: layer.bias"),
        ({"match": "layer.bias"}, r"layer.bias \[4\]"),
        ({"match": "layer.kernel", "rank": 5}, r"`lora.rank` 5 is larger than 4.*layer.kernel \[6, 4\]"),
        ({"match": "layer.kernel", "rank_pattern": {"layer.*": 9}}, "9 is larger than 4"),
        ({"match": "("}, "'\\(', no regular expression"),
        ({"match": "x", "alpha_pattern": {"(": 1.0}}, "'\\('"),
        ({"match": "x", "rank": 0}, "`lora.rank`.*0"),
        ({"match": "x", "dropout": 1.0}, "`lora.dropout`.*1.0"),
        ({"match": "x", "base_dtype": "int8"}, "`lora.base_dtype`.*int8"),
    ]:
        with pytest.raises(ValueError, match=fault):
            program(**{"rank": 2, **options}).shapes(jax.random.key(0), X)


def test_a_part_of_the_paths_lists_all_parameters_that_have_it():
    layers = {f"layer_{number}": {"query": {"kernel": np.ones((4, 4))}} for number in range(3)}
    with pytest.raises(ValueError, match="'query'.*layer_0.query.kernel, layer_1.query.kernel, layer_2.query.kernel"):
        LoRA(match="query", rank=2).matched({**layers, "head": {"kernel": np.ones((4, 2))}})


def test_several_optimizers_are_refused():
    both = Optimizers({"a": optax.sgd(0.1), "b": optax.sgd(0.1)})
    with pytest.raises(ValueError, match="`lora`.*a.*b"):
        function_program(lambda key, batch: {}, lambda *_, **__: 0.0, both, lora=LoRA(match="a"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule_free_sgd", "f16"])
def test_averages_and_a_loss_scale_are_those_of_adapters(name):
    tx = optax.contrib.schedule_free_sgd(0.1) if name != "f16" else optax.adam(0.1)
    compiled = program(tx=tx, precision="f16" if name == "f16" else "f32", **LORA)
    before, state = model_params(compiled.init(jax.random.key(0), X)), trained(compiled)
    assert np.any(model_params(state)["layer"]["kernel"] != before["layer"]["kernel"])
    assert_same_bits(compiled.init_from_params(jax.random.key(0), weights_of(state), {}).frozen, state.frozen)


def program(
    *, layout: Layout | None = None, micro_batches: int = 1, tx: Any = None, precision: str = "f32", **lora: Any
) -> Any:
    def init(key: jax.Array, batch: Any) -> Any:
        return {"layer": {"kernel": jax.random.normal(key, (6, 4)), "bias": jnp.zeros(4)}}

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
        return ((batch @ params["layer"]["kernel"] + params["layer"]["bias"] - 1) ** 2).mean()

    adapted = LoRA(**lora) if lora else None
    options: dict[str, Any] = {"lora": adapted, "micro_batches": micro_batches, "precision": precision}
    made = function_program(init, loss, tx or optax.adam(0.1), **options)
    return compile_program(made, layout=layout)


def trained(compiled: Any, steps: int = 3) -> Any:
    state = compiled.init(jax.random.key(0), X)
    buffer = compiled.train_buffer(state, X, steps)
    for _ in range(steps):
        state, buffer, _ = compiled.train_step(state, buffer, compiled.place(X, stacked=False))
    return state


LORA: dict[str, Any] = {"match": ".*kernel", "rank": 2, "alpha": 4.0}


def test_only_adapters_are_trained_and_have_an_optimizer_state():
    compiled = program(**LORA)
    before, state = compiled.init(jax.random.key(0), X), trained(compiled)
    assert_same_bits(before.frozen, state.frozen)
    assert_same_bits(before.frozen.params, program().init(jax.random.key(0), X).params)
    assert [leaf.shape for leaf in jax.tree.leaves(state.params)] == [(6, 2), (2, 4)]
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) == 2 * (6 * 2 + 2 * 4) + 1
    merged = model_params(state)
    assert np.any(merged["layer"]["kernel"] != state.frozen.params["layer"]["kernel"])
    assert_same_bits(merged["layer"]["bias"], state.frozen.params["layer"]["bias"])


def test_the_base_is_an_argument_of_the_step_and_keeps_its_buffers():
    compiled = program(**LORA)
    state = compiled.init(jax.random.key(0), X)
    lowered = compiled.lowered_train(state, compiled.train_buffer(state, X, 1), X)
    assert len(lowered.args_info[0][0]) == len(jax.tree.leaves(state))
    assert "dense<" not in "".join(line for line in lowered.as_text().splitlines() if "6x4xf32" in line)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.frozen)]
    state, _, _ = compiled.train_step(state, compiled.train_buffer(state, X, 1), X)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.frozen)] == before


def test_the_base_is_sharded_as_the_parameters_are():
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    layout = Layout(mesh=mesh, param_spec=lambda path, shape: jax.P("fsdp") if path == "layer.kernel" else jax.P())
    state, alone = trained(program(layout=layout, **LORA)), trained(program(**LORA))
    assert state.frozen.params["layer"]["kernel"].sharding.spec == jax.P("fsdp")
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((state.params, state.opt_state)))
    for one, other in zip(*(jax.tree.leaves(one.params) for one in (state, alone)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert digest_of(state.frozen) == digest_of(alone.frozen)


@pytest.mark.slow
def test_micro_batches_and_a_base_in_bf16_compute_nearly_the_same():
    plain, micro = trained(program(**LORA)), trained(program(micro_batches=2, **LORA))
    half = trained(program(base_dtype="bfloat16", **LORA))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.frozen)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.params)} == {"float32"}
    for other, tolerance in ((micro, 1e-4), (half, 0.1)):
        for one, two in zip(*(jax.tree.leaves(one.params) for one in (plain, other)), strict=True):
            np.testing.assert_allclose(one, two, atol=tolerance)


def test_a_state_from_weights_has_the_same_adapters_as_a_new_one():
    compiled, key = program(**LORA), jax.random.key(0)
    params = program().init(key, X).params
    with pytest.raises(RuntimeError, match="`init` or `shapes`"):  # the axes are not known yet
        compiled.init_from_params(key, params, {})
    assert_same_bits(compiled.init(key, X), compiled.init_from_params(key, params, {}))
    state = trained(compiled)
    assert_same_bits(compiled.init_from_params(key, weights_of(state), {}).params, state.params)


def test_merging_a_base_in_bf16_does_not_round_the_adapters_away():
    state = trained(program(base_dtype="bfloat16", **LORA))
    merged = model_params(state)["layer"]["kernel"]
    assert merged.dtype == jnp.float32 and np.any(merged != merged.astype(jnp.bfloat16).astype(jnp.float32))


def test_a_digest_tells_bits_places_and_names_apart():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    alike = [
        array.T.copy(),
        array.reshape(4, 3),
        array[::-1],
        -array,
        array.astype(np.float64),
        array > 3,
        array.astype(jnp.bfloat16),
    ]
    digests = {digest_of({"a": jnp.asarray(one)}) for one in [array, *alike]} | {digest_of({"b": jnp.asarray(array)})}
    assert len(digests) == len(alike) + 2 - (not jax.config.jax_enable_x64)  # type: ignore[attr-defined]
    assert digest_of({"a": jnp.asarray(array)}) == digest_of({"a": jnp.array(array.copy())})
    assert digest_of({}) == ""
