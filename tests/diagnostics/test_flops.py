import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_trainer.diagnostics.traced import flops_of, total

PHASES = ("forward", "backward", "other")
X, W = jnp.zeros((4, 8)), jnp.zeros((8, 8))


def counted(function, *args):
    return total(flops_of(jax.make_jaxpr(function)(*args)))


def test_a_gradient_takes_a_product_for_each_input_and_one_for_the_output():
    found = flops_of(jax.make_jaxpr(jax.grad(lambda w: (jnp.tanh(X @ w) @ w).sum()))(W))
    products = {phase: sum(one.flops for one in found if one.dtype and one.phase == phase) for phase in PHASES}
    assert products == {"forward": 2 * 2 * 4 * 8 * 8, "backward": 3 * 2 * 4 * 8 * 8, "other": 0}


def test_a_loop_counts_every_iteration():
    (product,) = [one for one in flops_of(jax.make_jaxpr(repeated)(X)) if one.dtype]
    assert product.flops == 5 * 2 * 4 * 8 * 8


def repeated(x):
    return lax.fori_loop(0, 5, lambda _, x: x @ W, x)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_each_derivative_of_a_convolution_costs_as_much_as_itself(stride, groups):
    images, kernel = jnp.zeros((2, 8, 8, 4)), jnp.zeros((3, 3, 4 // groups, 8))

    def convolved(images, kernel):
        dims, window = ("NHWC", "HWIO", "NHWC"), (stride, stride)
        options = {"dimension_numbers": dims, "feature_group_count": groups}
        return lax.conv_general_dilated(images, kernel, window, "SAME", **options).sum()

    found = flops_of(jax.make_jaxpr(jax.grad(convolved, (0, 1)))(images, kernel))
    forward, backward = (sum(one.flops for one in found if one.dtype and one.phase == phase) for phase in PHASES[:2])
    assert forward == 2 * 2 * (8 // stride) ** 2 * 8 * 9 * 4 / groups
    assert backward == pytest.approx(2 * forward, rel=0.3)  # at the borders it differs


def test_products_are_counted_as_xla_counts_them():
    def loss(w):
        return (jnp.tanh(X @ w) ** 2).sum()

    step = jax.value_and_grad(loss)
    cost = jax.jit(step).lower(W).compile().cost_analysis()
    assert cost is not None
    assert counted(step, W) == pytest.approx(cost["flops"], rel=0.2)


def test_scopes_name_what_is_computed_also_inside_of_functions():
    @jax.jit
    def inner(x):
        with jax.named_scope("inner"):
            return x @ W

    def outer(x):
        with jax.named_scope("outer"):
            return inner(x)

    assert [one.scopes for one in flops_of(jax.make_jaxpr(outer)(X))] == [("outer", "inner")]


def test_of_a_condition_the_most_expensive_branch_counts():
    assert counted(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: x, x), X) == 2 * 4 * 8 * 8


def test_moving_values_costs_nothing():
    assert counted(lambda x: x.reshape(2, 16).T[:3].astype(jnp.bfloat16), X) == 0
