"""The cost of a step in each style, compared with a hand-written loop.

    PYTHONPATH=src python benchmarks/styles.py [--rounds 5] [--case tiny]

All train the same MLP with Adam on the same arrays, in the same order. Every run compiles in its first epoch, which is
not counted; the result is the median of the others. Runs alternate; a ratio is the median over rounds of the ratio
within a round. Equal `|params|`, the norm of the final parameters, shows that variants compute the same. Styles check
for non-finite losses and log, and `fit` writes TensorBoard; hand-written loops do not. No variant saves: an epoch is
shorter than writing a checkpoint. A report, not a test.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from trainer_overhead import EPOCHS, SIZES, TX, Epochs, Mlp

import jax_trainer as jt
from jax_trainer.callbacks import ModelCheckpointConfig

Measurement = tuple[float, float]  # seconds of an epoch, and the norm of the parameters


class NnxMlp(nnx.Module):
    def __init__(self, sizes: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_of(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch[0]), batch[1])


def by_hand(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> Measurement:
    """One dispatch per step, with donated parameters and optimizer state; no metrics are fetched."""
    model = Mlp(sizes)
    params = model.init(jax.random.key(0), next(loader.epoch(1))[0])
    opt_state = TX.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(model.apply(params, x), y))(params)
        updates, opt_state = TX.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, opt_state, (loss, optax.tree.norm(grads), optax.tree.norm(params))

    seconds = []
    for epoch in range(1, EPOCHS + 1):
        started = time.perf_counter()
        for x, y in loader.epoch(epoch):
            params, opt_state, _ = step(params, opt_state, x, y)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), float(optax.tree.norm(params))


def nnx_by_hand(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> Measurement:
    """`nnx.jit` of the step, as in the Flax documentation."""
    model = NnxMlp(sizes, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, grads)
        return loss

    seconds = []
    for epoch in range(1, EPOCHS + 1):
        started = time.perf_counter()
        for batch in loader.epoch(epoch):
            step(model, optimizer, batch)
        jax.block_until_ready(nnx.state(model))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:]), _norm(model)


def run_fit(model: Any, loader: jt.ArrayLoader, **options: Any) -> Measurement:
    epochs = Epochs()
    with tempfile.TemporaryDirectory() as folder:
        result = jt.fit(
            model,
            loader,
            loss_fn=cross_entropy,
            optimizer=TX,
            num_epochs=EPOCHS,
            callbacks=[epochs, ModelCheckpointConfig(every_n_epochs=100)],
            log_dir=folder,
            progress=False,
            **options,
        )
    return statistics.median(epochs.seconds[1:]), float(optax.tree.norm(result.state.params))


class Trainer(jt.TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return cross_entropy(logits, batch[1]), (mutable, {})


def run_trainer(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> Measurement:
    epochs = Epochs()
    with tempfile.TemporaryDirectory() as folder:
        options = {"train_epochs": EPOCHS, "enable_progress_bar": False, "logger": jt.LoggerConfig(log_dir=folder)}
        example = next(loader.epoch(1))
        made = Trainer(model=Mlp(sizes), optimizer=TX, exmp_input=example, callbacks=[epochs], **options)
        made.train_model(loader)
    return statistics.median(epochs.seconds[1:]), float(optax.tree.norm(made.state.params))


def run_train_fn(
    sizes: tuple[int, ...], loader: jt.ArrayLoader, every: int | None = None, **options: Any
) -> Measurement:
    """`train_fn` with a hook that records the time once per epoch, and an empty hook every `every` steps."""
    moments: list[float] = []
    batches = len(loader)

    def clock(step: int, *, model: Any, **kwargs: Any) -> None:
        jax.block_until_ready(nnx.state(model))
        moments.append(time.perf_counter())

    def idle(step: int, *, model: Any, **kwargs: Any) -> None:
        pass

    clock.every_n_steps = batches  # type: ignore[attr-defined]
    if every != 1:
        idle.every_n_steps = every or batches  # type: ignore[attr-defined]
    model = NnxMlp(sizes, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    train = jt.train_fn(
        fns=(lambda model, key, batch: nnx.value_and_grad(loss_of)(model, batch), lambda model, key, batch: 0.0),
        n_steps=EPOCHS * batches,
        eval_every_n_steps=EPOCHS * batches,
        n_eval_batches=1,
        hooks=[clock, idle],
        progress=False,
        **options,
    )
    train(jax.random.key(0), model, optimizer, loader, None)
    return statistics.median(np.diff(moments)), _norm(model)


def run_train_loop(sizes: tuple[int, ...], loader: jt.ArrayLoader, checkpoint_every: int | None = None) -> Measurement:
    """`TrainLoop` with a checkpoint per epoch, or every `checkpoint_every` steps."""
    model, batches = Mlp(sizes), len(loader)
    loop = jt.TrainLoop(
        init=model.init,
        task=jt.TrainTask(apply=model.apply, optimizer=TX, loss=cross_entropy, data=loader),
        n_steps=EPOCHS * batches,
        n_steps_per_checkpoint=checkpoint_every or batches,
        stdout=False,
    )
    moments, last = [], None
    for last in loop:
        if last.step % batches == 0:
            jax.block_until_ready(last.model_params)
            moments.append(time.perf_counter())
    assert last is not None
    return statistics.median(np.diff(moments)), float(optax.tree.norm(last.model_params))


def _norm(model: Any) -> float:
    return float(optax.tree.norm(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


VARIANTS: dict[str, Callable[..., Measurement]] = {
    "linen by hand": by_hand,
    "nnx.jit by hand": nnx_by_hand,
    "TrainerModule, linen": run_trainer,
    "fit, linen": lambda sizes, loader: run_fit(Mlp(sizes), loader),
    "fit, nnx": lambda sizes, loader: run_fit(NnxMlp(sizes, nnx.Rngs(0)), loader),
    "fit, linen, 25 steps per call": lambda sizes, loader: run_fit(Mlp(sizes), loader, steps_per_call=25),
    "train_fn": run_train_fn,
    "train_fn, 25 steps per call": lambda sizes, loader: run_train_fn(sizes, loader, steps_per_call=25),
    "train_fn, a hook every 100 steps": lambda sizes, loader: run_train_fn(sizes, loader, 100),
    "train_fn, a hook at every step": lambda sizes, loader: run_train_fn(sizes, loader, 1),
    "TrainLoop": run_train_loop,
    "TrainLoop, a checkpoint every 10 steps": lambda sizes, loader: run_train_loop(sizes, loader, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=list(SIZES), help="only this size")
    args = parser.parse_args()
    for name in SIZES if args.case is None else [args.case]:
        sizes, batch_size, batches = SIZES[name]
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch_size * batches, sizes[0]), np.float32)
        y = rng.integers(sizes[-1], size=len(x), dtype=np.int32)
        loader = jt.ArrayLoader((x, y), batch_size, shuffle=True, drop_last=True)
        rounds = [{kind: run(sizes, loader) for kind, run in VARIANTS.items()} for _ in range(args.rounds)]
        print(f"{name} ({jax.devices()[0].device_kind}), µs per step, ratio to linen by hand, |params|")
        for kind in VARIANTS:
            micro = statistics.median(one[kind][0] for one in rounds) / batches * 1e6
            ratio = statistics.median(one[kind][0] / one["linen by hand"][0] for one in rounds)
            print(f"  {kind:<40}{micro:>9.0f}{ratio:>8.2f}{rounds[0][kind][1]:>11.4f}")


if __name__ == "__main__":
    main()
