import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_trainer.core.equations import Traced, array_digest, traced_equations

TABLE = np.arange(6.0, dtype=np.float32)


def traced(function: Any, *args: Any, wanted: int = 1) -> Traced:
    jaxpr = jax.make_jaxpr(function)(*args)
    return traced_equations(jaxpr, [at < wanted for at in range(len(jaxpr.jaxpr.outvars))])


X = jnp.ones((4, 6))


def base(x: Any) -> Any:
    return jnp.sum(jax.nn.relu(x) * 0.5 + TABLE)


def renamed(values: Any) -> Any:
    table, half = TABLE.copy(), 0.5
    activated = jax.jit(jax.nn.relu)(values)
    return jnp.sum(activated * half + table)


OTHERS = {
    "a constant": lambda x: jnp.sum(jax.nn.relu(x) * 0.25 + TABLE),
    "an array": lambda x: jnp.sum(jax.nn.relu(x) * 0.5 + TABLE[::-1]),
    "an operation": lambda x: jnp.sum(jax.nn.gelu(x) * 0.5 + TABLE),
    "a parameter": lambda x: jnp.sum(jax.nn.relu(x) * 0.5 + TABLE, axis=0)[0],
    "which values": lambda x: jnp.sum(jax.nn.relu(x) * 0.5 + TABLE) * 0 + jnp.sum(x),
}


def test_another_computation_has_another_digest():
    for name in OTHERS:
        assert traced(OTHERS[name], X).digest != traced(base, X).digest, name


def test_names_and_unused_results_do_not_count():
    def reporting(x: Any) -> Any:
        return base(x), jnp.linalg.norm(x), jnp.mean(x) * 3

    assert traced(reporting, X).digest == traced(base, X).digest
    assert traced(reporting, X, wanted=3).digest != traced(base, X).digest


def test_constraints_of_shardings_do_not_count():
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    rows = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.custom_jvp
    def kept(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, rows)

    kept.defjvps(lambda dot, primal, x: dot)
    for constrain in (kept, lambda x: jax.lax.with_sharding_constraint(x, rows)):
        assert traced(lambda x, constrain=constrain: base(constrain(x)), X).digest == traced(base, X).digest


def test_the_equations_of_inner_functions_are_compared_one_by_one():
    def scanned(factor: float) -> Traced:
        body = lambda total, row: (total + jnp.sin(row).sum() * factor, None)
        return traced(lambda x: jax.lax.scan(body, 0.0, x)[0], X)

    one, other = scanned(2.0), scanned(3.0)
    text = other.difference(one.text(update=False), update=False)
    assert text.startswith("1 of ") and "`<lambda>`, line" in text and "test_equations.py" in text
    assert one.difference(one.text(update=False), update=False) == ""


def test_equations_of_given_results_are_left_out():
    def init(key: Any) -> Any:
        weights = jax.random.normal(key, (3,))
        optimizer: Any = optax.inject_hyperparams(optax.sgd)(0.1).init(weights)
        return weights, optimizer.hyperparams["learning_rate"], 2 * weights

    jaxpr = jax.make_jaxpr(init)(jax.random.key(0))
    rest = traced_equations(jaxpr, [False, True, True], given=[True, False, False])
    assert len(rest.equations) < len(traced_equations(jaxpr, [True, False, False]).equations)


def test_arrays_are_told_apart_by_every_bit_and_its_place():
    big = np.random.default_rng(0).integers(0, 255, 100_003).astype(np.uint8)
    seen = {array_digest(big)}
    for place in (0, 7, 8, 50_000, 100_002):
        other = big.copy()
        other[place] ^= 1
        seen.add(array_digest(other))
    rows = big[:100_000].reshape(-1, 100)
    seen |= {array_digest(rows), array_digest(rows[::-1]), array_digest(jax.random.key(1)), array_digest(np.zeros(0))}
    assert len(seen) == 10 and array_digest(jnp.asarray(big)) in seen


PROGRAM = """
import jax, jax.numpy as jnp, optax
from jax_trainer.core.equations import traced_equations
tx = optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
params = {"w": jnp.ones((6, 3)), "b": jnp.zeros(3)}
def step(params, state, x):
    grads = jax.grad(lambda p: optax.huber_loss(x @ p["w"] + p["b"]).mean())(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
jaxpr = jax.make_jaxpr(step)(params, tx.init(params), jnp.ones((4, 6)))
print(traced_equations(jaxpr, [True] * len(jaxpr.jaxpr.outvars)).digest)
"""


def test_a_digest_is_the_same_in_every_process():
    def printed(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True).stdout

    assert printed("1") == printed("2") != ""
