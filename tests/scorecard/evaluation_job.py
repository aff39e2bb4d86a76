"""One of several processes that evaluate 21 examples; prints the metrics next to those computed by numpy."""

import json
import sys

import jax
import numpy as np
import optax

import jax_trainer.sharding  # noqa: F401 - lets the loops of several processes work together
from jax_trainer.adapters import function_program
from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import evaluate
from jax_trainer.sharding import Layout, init_ddp_mesh

data = {"x": np.random.default_rng(0).normal(size=(21, 3)).astype(np.float32)}


def loss(params, batch, *, rng, train):
    first = batch["x"][:, 0]
    metrics = {
        "count": {"value": first.shape[0], "mode": "sum"},
        "sum": {"value": batch["x"].sum(), "mode": "sum"},
        "max": {"value": batch["x"].max(), "mode": "max"},
        "min": {"value": batch["x"].min(), "mode": "min"},
        "weighted": {"value": (first**2).sum(), "count": abs(first).sum()},
    }
    return (batch["x"] @ params).mean(), metrics


program = function_program(init=lambda key, batch: jax.numpy.arange(1.0, 4.0), loss=loss, tx=optax.sgd(0.1))
compiled = compile_program(program, layout=Layout(mesh=init_ddp_mesh()), on_recompile="ignore")
loader = ArrayLoader(data, int(sys.argv[4]))
state = compiled.init(jax.random.key(0), next(iter(loader)))
found = evaluate(compiled, state, {"val": loader})["val"]
x = data["x"].astype(np.float64)
expected = {
    "loss": (x @ np.arange(1.0, 4.0)).mean(),
    "sum": x.sum(),
    "max": x.max(),
    "min": x.min(),
    "weighted": (x[:, 0] ** 2).sum() / abs(x[:, 0]).sum(),
}
compared = {name: (float(found[name]), float(value)) for name, value in expected.items()}
sys.stdout.write(json.dumps({"count": int(found["count"]), "metrics": compared}) + "\n")
