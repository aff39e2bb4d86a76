"""Batches without a common first axis have a size of their own: graphs, and several loaders in a dict."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import fit
from jax_trainer.adapters import function_program
from jax_trainer.adapters.nnx import nnx_step_program
from jax_trainer.core import Program, compile_program
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.datasets import Data, DataError, DataSource, Position
from jax_trainer.engine import Plan, evaluate, run
from jax_trainer.testing import EventRecorder

SIZES = [4, 1, 3]
MEAN = sum(size * number for number, size in enumerate(SIZES)) / sum(SIZES)


def graph(number: int, size: int | None) -> dict[str, Any]:
    """A batch of padded graphs, whose loss is its number."""
    real = np.arange(5) < SIZES[number]
    batch = {"nodes": np.full((12, 2), number, np.float32), "edges": np.zeros((9, 2), np.int32), "real": real}
    return batch if size is None else {**batch, "size": size}


GRAPHS = [graph(number, size) for number, size in enumerate(SIZES)]
UNCOUNTED = [graph(number, None) for number in range(len(SIZES))]


def test_a_list_of_batches_of_two_numbers_is_data():
    batches = [np.zeros(2), np.ones(2)]  # since numpy 2.5, a pattern `(a, b)` matches such an array
    assert DataSource(batches, "train").full_batch() == 2


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    value = params["a"] * 0 + params["b"] * 0 + batch["nodes"].mean()
    return value, {"doubled": 2 * value}


def losses(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    value, metrics = loss(params, batch, rng=rng, train=train)
    return {"a": value, "b": params["b"] * 0}, metrics


def init(key: jax.Array, batch: Any) -> Any:
    return {"a": jnp.zeros(()), "b": jnp.zeros(())}


def plain_program(**options: Any) -> Program:
    return function_program(init, loss, optax.sgd(0.1), **options)


def alternating_program(**options: Any) -> Program:
    return function_program(init, losses, Optimizers({"a": optax.sgd(0.1), "b": optax.sgd(0.1)}), **options)


def step_program(**options: Any) -> Program:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

    def loss(model: Any, batch: Any) -> Any:
        value = 0 * model.kernel[...].sum() + batch["nodes"].mean()
        return value, {"doubled": 2 * value}

    def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
        return nnx.value_and_grad(loss, has_aux=True)(model, batch)

    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    return nnx_step_program(model, optimizer, train_step, lambda model, rng_key, batch: loss(model, batch), **options)


def metrics_of(program: Program, data: Any, **plan: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of one epoch, and of an evaluation."""
    compiled = compile_program(program)
    state, seen = compiled.init(jax.random.key(0), GRAPHS[0]), EventRecorder()
    state = run(compiled, state, Data(data), Plan(max_epochs=1, **plan), [seen])
    return seen.epochs[1], evaluate(compiled, state, {"val": data})["val"]


def test_metrics_are_weighted_by_the_size_of_each_batch(subtests):
    for counts in ["entry", "function"]:
        for steps_per_call in [1, 3]:
            for program in [plain_program, alternating_program, step_program]:
                with subtests.test(program=program, steps_per_call=steps_per_call, counts=counts):
                    by_function = counts == "function"
                    made = program(**({"batch_size_of": lambda batch: batch["real"].sum()} if by_function else {}))
                    data = UNCOUNTED if by_function else GRAPHS
                    for metrics in metrics_of(made, data, steps_per_call=steps_per_call):
                        assert metrics["doubled"] == pytest.approx(2 * MEAN)
                        assert metrics["loss"] == pytest.approx(MEAN)


def test_a_loader_whose_batch_size_is_known_may_have_batches_that_only_a_function_can_count():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(UNCOUNTED, batch_size=1, collate_fn=lambda batches: batches[0])  # type: ignore[arg-type]
    trained, _ = metrics_of(plain_program(batch_size_of=lambda batch: batch["real"].sum()), loader)
    assert trained["loss"] == pytest.approx(MEAN)


@pytest.mark.filterwarnings("ignore:.*compiled again")
def test_an_evaluation_of_rows_that_are_not_examples_is_not_padded(tmp_path):
    # as many rows as the graphs have nodes: a mask of the rows would count 4, 4 and 2 nodes
    rows, sizes = [4, 4, 2], [1, 3, 2]
    batches = [{"x": np.full((n, 1), k, np.float32), "y": np.zeros(n)} for k, n in enumerate(rows)]
    sized = [{**batch, "size": size} for batch, size in zip(batches, sizes, strict=True)]
    model = nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    options: Any = {"optimizer": optax.sgd(0.0), "num_epochs": 1, "save": False, "progress": False, "log_dir": tmp_path}
    error = lambda outputs, targets: outputs[:, 0] - targets
    assert fit(model, batches[:2], batches, loss_fn=error, **options).history[1]["val/loss"] == pytest.approx(8 / 10)
    assert fit(model, sized[:2], sized, loss_fn=error, **options).history[1]["val/loss"] == pytest.approx(7 / 6)


def test_a_position_counts_the_examples_that_a_batch_declares():
    assert DataSource(GRAPHS, "train").full_batch() == SIZES[0]
    with pytest.raises(DataError, match=f"2 batches of 9.* {SIZES[0]} now"):
        DataSource(GRAPHS, "train").position_at(Position(1, 2), 9)
