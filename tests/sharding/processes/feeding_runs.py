"""Runs whose batches are loaded by several processes or by one; results as JSON-serialisable data."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import jax_trainer.sharding  # noqa: F401 - lets the loops of several processes work together
from jax_trainer.adapters import function_program
from jax_trainer.core import CompiledProgram, NonFiniteError, compile_program, with_finite_guard
from jax_trainer.datasets import ArrayLoader, Data, SupervisedBatch
from jax_trainer.datasets.records import GrainLoader
from jax_trainer.engine import EpochEnd, Plan, StepMetrics, evaluate, predictions, train_events
from jax_trainer.sharding import Layout
from jax_trainer.sharding.layout import replicate

TRAIN, EVAL, SIZE = 44, 21, 8  # five full batches and one of 4; two and one of 5


def examples(count: int, seed: int = 0) -> SupervisedBatch:
    """Examples with distinct targets."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return SupervisedBatch.of(x, np.arange(count, dtype=np.int32))


def rows(batch: SupervisedBatch, chosen: Any) -> dict[str, np.ndarray]:
    """Selected examples as a dict, as from a custom loader."""
    return {"x": batch.input[chosen], "id": batch.target[chosen]}


def _loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    x, ids, size = (
        (batch["x"], batch["id"], len(batch["id"]))
        if isinstance(batch, dict)
        else (batch.input, batch.target, batch.size)
    )
    hidden = jnp.tanh(x @ params["in"])
    kept = jax.random.bits(rng, (8,)) % 5 > 0 if train else 1  # of few numbers, which compiles quickly
    each = (((hidden * kept) @ params["out"])[:, 0] - x.sum(-1)) ** 2
    return each.mean(), {
        "ids": {"value": ids, "mode": "concat"},
        "size": {"value": size, "mode": "sum"},
        "worst": {"value": each.max(), "mode": "max"},
    }


def _init(key: jax.Array, batch: Any) -> Any:
    x = batch["x"] if isinstance(batch, dict) else batch.input
    draw = np.random.default_rng(1).normal  # not from the key: that would have to be compiled
    weights = {"in": jnp.asarray(draw(size=(4, 8)), jnp.float32), "out": jnp.asarray(draw(size=(8, 1)), jnp.float32)}
    return {**weights, "in": weights["in"] + x.mean()}  # the values of the example matter


def mesh(*sizes: int, devices: Any = None, names: tuple[str, ...] = ("data", "tensor")) -> Mesh:
    """A mesh of the first devices."""
    found = np.array(jax.devices() if devices is None else devices)
    sizes = sizes or (len(found),)
    return Mesh(found[: int(np.prod(sizes))].reshape(sizes), names[: len(sizes)])


def _predict(state: Any, batch: Any) -> Any:
    return {"id": batch.target, "x": batch.input @ state.params["in"]}


def _columns(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(None, "tensor") if path == "in" else PartitionSpec()


def program(grid: Mesh, *, guarded: bool = False, split: bool = False) -> CompiledProgram:
    """A small network, sharded over `grid`."""
    made = function_program(_init, _loss, optax.sgd(0.01))
    predict = made._replace(predict_step=_predict)
    layout = Layout(mesh=grid, batch_axes=("data",), param_spec=_columns if split else replicate)
    return compile_program(with_finite_guard(predict, 0) if guarded else predict, layout=layout, on_recompile="ignore")


def started(compiled: CompiledProgram, example: Any) -> Any:
    """A new state. Every process has another example; that of process 0 is used."""
    example = jax.tree.map(lambda leaf: leaf + np.asarray(jax.process_index(), leaf.dtype), example)
    return compiled.init(jax.random.key(1), example)


def trained(compiled: CompiledProgram, data: Any, epochs: int = 2, **plan: Any) -> dict[str, Any]:
    """The losses of the steps, all ids in training order, and the final weights."""
    losses, ids, state = [], [], None
    state = started(compiled, plan.pop("example", examples(SIZE, seed=3)))
    for event in train_events(compiled, state, data, Plan(max_epochs=epochs, metrics_every=2, **plan)):
        if isinstance(event, StepMetrics):
            losses += event.rows.values_of("loss").tolist()
        if isinstance(event, EpochEnd):
            ids.append(np.asarray(event.metrics["ids"]).tolist())
            state = event.state
    weights = [leaf.addressable_data(0).tolist() for leaf in jax.tree.leaves(state.params)]
    return {"losses": losses, "ids": ids, "weights": weights}


def evaluated(compiled: CompiledProgram, data: Any) -> dict[str, Any]:
    """The metrics of an evaluation."""
    found = evaluate(compiled, started(compiled, examples(SIZE, seed=3)), {"val": data})["val"]
    return {name: np.asarray(value).tolist() for name, value in found.items()}


def predicted(compiled: CompiledProgram, data: Any) -> list[Any]:
    """The ids of all predicted examples, and the outputs of the last batch."""
    found = list(predictions(compiled, started(compiled, examples(SIZE, seed=3)), data))
    return [np.concatenate([batch["id"] for batch in found]).tolist(), found[-1]["x"].tolist()]


def loaders() -> dict[str, Any]:
    """Training sets that split their batches between processes."""
    data = examples(TRAIN)
    options: dict[str, Any] = {"shuffle": True, "seed": 5}
    records = [rows(data, index) for index in range(TRAIN)]
    return {
        "arrays": ArrayLoader(data, SIZE, **options),
        "records": GrainLoader(
            records, SIZE, **options, read_ahead=0, decode=lambda record: SupervisedBatch(1, record["x"], record["id"])
        ),
    }


def shared_runs(grid: Mesh, *names: str) -> Iterator[tuple[str, Any]]:
    """Runs (all, or those in `names`) whose results do not depend on the number of processes."""
    compiled, sets = program(grid), loaders()
    found: dict[str, Callable[[], Any]] = {
        "arrays": lambda: trained(compiled, Data(sets["arrays"], prefetch=2)),
        "records in chunks": lambda: trained(compiled, sets["records"], steps_per_call=3),
        "resident in chunks": lambda: trained(compiled, Data(sets["arrays"], resident=True), steps_per_call=4),
        "overfit": lambda: trained(compiled, sets["arrays"], overfit_batches=2),
        "bad": lambda: bad_batch(grid),
    }
    yield from ((name, found[name]()) for name in names or found)


def shared_evaluations(grid: Mesh) -> Iterator[tuple[str, Any]]:
    """Evaluations whose results do not depend on the number of processes; 6 does not divide by 4 devices."""
    compiled, val = program(grid), examples(EVAL, seed=1)
    for size in (8, 6):
        yield f"evaluated by {size}", evaluated(compiled, ArrayLoader(val, size))
    yield "predicted", predicted(compiled, ArrayLoader(val, 8))
    yield "replicated", evaluated(compiled, ArrayLoader(val, 8, process=(0, 1)))


def tensor_runs(grid: Mesh) -> dict[str, Any]:
    """A run with weights sharded over an axis that does not shard batches."""
    compiled, val = program(grid, split=True), examples(EVAL, seed=1)
    run = trained(compiled, loaders()["arrays"])
    return {"losses": run["losses"], "ids": run["ids"], "evaluated": evaluated(compiled, ArrayLoader(val, SIZE))}


def own_runs(grid: Mesh, index: int, count: int) -> Iterator[tuple[str, Any]]:
    """Runs on lists of batches, a different one in each process."""
    compiled, data = program(grid), examples(TRAIN)
    example = rows(data, slice(4))
    own = np.array_split(np.arange(SIZE), count)[index]
    equal = [rows(data, start + own) for start in range(0, 40, SIZE)]

    def run(batches: Any, **plan: Any) -> Any:
        return outcome_of(lambda: trained(compiled, Data(batches), example=example, **plan))

    yield "equal in chunks", run(lambda: iter(equal), steps_per_call=2)
    if count == 1:
        return
    yield "fewer", run(equal[: 5 - index])
    yield "smaller", run([rows(data, own[: 4 - index])])
    yield "ragged", run([*equal, rows(data, own[:2])])
    yield "failing", run(lambda: _failing(equal, 2 if index else 9))
    yield "number", run([{**batch, "heat": np.float32(index)} for batch in equal])
    yield "lengths", run([{"x": data.input[:4], "id": data.target[:3]}])


def odd_part(grid: Mesh) -> Any:
    """The result of three examples on two devices."""
    batches = [rows(examples(TRAIN), slice(3))]
    return outcome_of(lambda: trained(program(grid), Data(batches), example=batches[0]))


def without_layout() -> Any:
    """The result of a program without layout in several processes."""
    compiled = compile_program(function_program(_init, _loss, optax.sgd(0.1)))
    return outcome_of(lambda: trained(compiled, loaders()["arrays"]))


def _failing(batches: list[Any], after: int) -> Iterator[Any]:
    yield from batches[:after]
    if after < len(batches):
        raise OSError("the disk failed")


OWN_VAL = {  # the examples that each of two processes has, batch by batch
    "uneven": ([[0, 1, 2], [3, 4, 5], [6, 7]], [[8, 9, 10, 11, 12]]),
    "nothing": ([], [[3], [1, 2]]),
}


def own_evaluations(grid: Mesh, index: int) -> Iterator[tuple[str, Any]]:
    """Evaluations of lists of batches, a different one in each of two processes."""
    compiled, val = program(grid), examples(EVAL, seed=1)
    for name, sets in OWN_VAL.items():
        yield name, evaluated(compiled, [rows(val, chosen) for chosen in sets[index]])
    classes = [val[np.array(chosen)] for chosen in OWN_VAL["uneven"][index]]
    yield "classes", evaluated(compiled, classes)
    yield "predicted", predicted(compiled, lambda: iter(classes))
    yield "unknown class", outcome_of(lambda: evaluated(compiled, classes[:index]))
    yield (
        "kinds",
        outcome_of(lambda: evaluated(compiled, [{"x": val.input.astype(("f4", "f8")[index]), "id": val.target}])),
    )


def bad_batch(grid: Mesh) -> Any:
    """The non-finite batch that the guard found, at step 4."""
    data = examples(TRAIN)
    loader = ArrayLoader(data, SIZE, shuffle=True, seed=5)
    data.input[loader.order(1)[3 * SIZE + 5]] = np.nan
    return outcome_of(lambda: trained(program(grid, guarded=True), loader))


def outcome_of(run: Callable[[], Any]) -> Any:
    """The result of a run, or its error as data."""
    try:
        return run()
    except NonFiniteError as error:
        batch: Any = error.batch
        return [error.step, error.position, batch.target.tolist(), batch.size]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def report(results: Any) -> None:
    """Writes results as JSON for the parent process."""
    sys.stdout.write(json.dumps(dict(results)) + "\n")
