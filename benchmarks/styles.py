"""The cost of a step and of an epoch end in each style, compared with a hand-written loop.

    PYTHONPATH=src python benchmarks/styles.py [--rounds 5] [--case tiny | medium | limits]

All train the same MLP with Adam on the same arrays, in the same order. Every run compiles in its first epoch, which is
not counted; the result is the median of the others. Runs alternate; a ratio is the median over rounds of the ratio
within a round. Equal `|params|`, the norm of the final parameters, shows that variants compute the same. Styles check
for non-finite losses and log, and `fit` writes TensorBoard; hand-written loops do not. In `tiny` and `medium` no
variant saves: an epoch is shorter than writing a checkpoint.

`limits` is the tiny case with everything on (`fit` saves after every epoch), against limits: with an `ArrayLoader`,
with a class of the user and with a generator function, each compared with a hand-written loop over the same data; and
the cost of an epoch end, the time of an epoch of 20 steps minus that of 20 hand-written steps. A report, not a test.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from operator import sub, truediv
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from mlp import LinenMlp, NnxMlp
from trainer_overhead import EPOCHS, SIZES, TX, Epochs

import jax_trainer as jt
from jax_trainer.callbacks import ModelCheckpointConfig

Measurement = tuple[float, float]  # seconds of an epoch, and the norm of the parameters


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_of(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch[0]), batch[1])


def by_hand(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> Measurement:
    """One dispatch per step, with donated parameters and optimizer state; no metrics are fetched."""
    seconds, params = hand_epochs(sizes, loader.epoch, EPOCHS)
    return statistics.median(seconds), float(optax.tree.norm(params))


def hand_epochs(
    sizes: tuple[int, ...], open_epoch: Callable[[int], Iterable[Any]], epochs: int, *, evaluates: bool = False
) -> tuple[list[float], Any]:
    """A hand-written loop: the seconds of every epoch but the first, which compiles, and the final parameters."""
    model = LinenMlp(sizes)
    params = model.init(jax.random.key(0), np.zeros((1, sizes[0]), np.float32))
    opt_state = TX.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda params: cross_entropy(model.apply(params, x), y))(params)
        updates, opt_state = TX.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, opt_state, (loss, optax.tree.norm(grads), optax.tree.norm(params))

    @jax.jit
    def evaluate(params: Any, x: Any, y: Any) -> jax.Array:
        return cross_entropy(model.apply(params, x), y)

    seconds = []
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        for x, y in open_epoch(epoch):
            params, opt_state, _ = step(params, opt_state, x, y)
        jax.block_until_ready([evaluate(params, x, y) for x, y in open_epoch(epoch)] if evaluates else params)
        seconds.append(time.perf_counter() - started)
    return seconds[1:], params


def nnx_by_hand(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> Measurement:
    """`nnx.jit` around the step, as Flax's own documentation has it."""
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


def fitted(model: Any, loader: jt.ArrayLoader, **options: Any) -> Measurement:
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


def trainer(sizes: tuple[int, ...], loader: jt.ArrayLoader) -> Measurement:
    epochs = Epochs()
    with tempfile.TemporaryDirectory() as folder:
        options = {"train_epochs": EPOCHS, "enable_progress_bar": False, "logger": jt.LoggerConfig(log_dir=folder)}
        example = next(loader.epoch(1))
        made = Trainer(model=LinenMlp(sizes), optimizer=TX, exmp_input=example, callbacks=[epochs], **options)
        made.train_model(loader)
    return statistics.median(epochs.seconds[1:]), float(optax.tree.norm(made.state.params))


def stepped(sizes: tuple[int, ...], loader: jt.ArrayLoader, every: int | None = None, **options: Any) -> Measurement:
    """`train_fn` with a hook that takes the time once per epoch, and one that does nothing every so many steps."""
    seconds, norm = stepped_epochs(sizes, loader, len(loader), every, **options)
    return statistics.median(seconds), norm


def stepped_epochs(
    sizes: tuple[int, ...], data: Any, batches: int, every: int | None = None, **options: Any
) -> tuple[list[float], float]:
    """The seconds of every epoch of `train_fn` but the first, and the norm of the parameters at the end."""
    moments: list[float] = []

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
    train(jax.random.key(0), model, optimizer, data, None)
    return list(np.diff(moments)), _norm(model)


def looped(sizes: tuple[int, ...], loader: jt.ArrayLoader, checkpoint_every: int | None = None) -> Measurement:
    """`TrainLoop` with a checkpoint per epoch, or every so many steps."""
    model, batches = LinenMlp(sizes), len(loader)
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
    "TrainerModule, linen": trainer,
    "fit, linen": lambda sizes, loader: fitted(LinenMlp(sizes), loader),
    "fit, nnx": lambda sizes, loader: fitted(NnxMlp(sizes, nnx.Rngs(0)), loader),
    "fit, linen, 25 steps per call": lambda sizes, loader: fitted(LinenMlp(sizes), loader, steps_per_call=25),
    "train_fn": stepped,
    "train_fn, 25 steps per call": lambda sizes, loader: stepped(sizes, loader, steps_per_call=25),
    "train_fn, a hook every 100 steps": lambda sizes, loader: stepped(sizes, loader, 100),
    "train_fn, a hook at every step": lambda sizes, loader: stepped(sizes, loader, 1),
    "TrainLoop": looped,
    "TrainLoop, a checkpoint every 10 steps": lambda sizes, loader: looped(sizes, loader, 10),
}


# --- with everything on, against limits


class OwnLoader:
    """A loader as users write it: shuffles, and gives fresh arrays."""

    def __init__(self, x: np.ndarray, y: np.ndarray, batch_size: int) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self) -> int:
        return len(self.x) // self.batch_size

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.random.default_rng(0).permutation(len(self.x))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            yield self.x[rows], self.y[rows]


class EpochEnds(jt.Callback):
    """Takes the time at every end of an epoch."""

    def reset(self) -> None:
        self.moments: list[float] = []

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        self.moments.append(time.perf_counter())


def fit_epochs(sizes: tuple[int, ...], data: Any, epochs: int, test_ds: Any = None) -> list[float]:
    """The seconds of every epoch of `fit` but the first: training, evaluation, logging and saving."""
    ends = EpochEnds()
    with tempfile.TemporaryDirectory() as folder:
        jt.fit(
            LinenMlp(sizes),
            data,
            test_ds,
            loss_fn=cross_entropy,
            optimizer=TX,
            num_epochs=epochs,
            callbacks=[ends],
            log_dir=folder,
            progress=False,  # the benchmark's output; on a terminal its thread draws ten times a second
        )
    return list(np.diff(ends.moments))


class Limited(NamedTuple):
    """What `compare` gives for a run of ours and the one by hand in the same round, and its limit."""

    name: str
    compare: Callable[[float, float], float]
    unit: str
    limit: float
    ours: list[float]
    by_hand: list[float]

    def __str__(self) -> str:
        middle = statistics.median(map(self.compare, self.ours, self.by_hand))
        least = self.compare(min(self.ours), min(self.by_hand))  # of all rounds: others on the machine hit it least
        verdict = "ok" if middle <= self.limit else "over"
        return f"  {self.name:<44}{middle:>8.2f}{least:>8.2f} {self.unit:<3}{self.limit:>7.2f}  {verdict}"


SHORT, SHORT_EPOCHS = 20, 120  # steps of a short epoch, and their number


def own_data(sizes: tuple[int, ...], batch_size: int, batches: int) -> dict[str, tuple[Any, Callable[[int], Any]]]:
    """The kinds of data: what is passed, and its epochs for a loop by hand."""
    x, y = random_data(sizes, batch_size * batches)
    loader, own = jt.ArrayLoader((x, y), batch_size, shuffle=True, drop_last=True), OwnLoader(x, y, batch_size)

    def generated() -> Iterator[Any]:
        yield from own

    return {
        "an ArrayLoader": (loader, loader.epoch),
        "a class of the user": (own, lambda epoch: own),
        "a generator function": (generated, lambda epoch: generated()),
    }


def measure_limits(rounds: int) -> list[Limited]:
    """Runs take turns; a ratio is within a round, of the medians over the epochs of a run."""
    sizes, batch_size, batches = SIZES["tiny"]
    rows: dict[str, Limited] = {}

    def add(name: str, unit: str, limit: float, ours: float, by_hand: float) -> None:
        compare = truediv if unit == "x" else sub
        row = rows.setdefault(name, Limited(name, compare, unit, limit, [], []))
        row.ours.append(ours)
        row.by_hand.append(by_hand)

    for _ in range(rounds):
        for kind, (data, open_epoch) in own_data(sizes, batch_size, batches).items():
            limit = 1.3 if kind == "an ArrayLoader" else 1.6
            hand = statistics.median(hand_epochs(sizes, open_epoch, EPOCHS)[0])
            runs = {"fit": fit_epochs(sizes, data, EPOCHS), "train_fn": stepped_epochs(sizes, data, batches)[0]}
            for style, seconds in runs.items():
                add(f"{style}, {kind}", "x", limit, statistics.median(seconds), hand)
        loader, open_epoch = own_data(sizes, batch_size, SHORT)["an ArrayLoader"]
        for evaluates in (False, True):
            hand, _ = hand_epochs(sizes, open_epoch, SHORT_EPOCHS, evaluates=evaluates)
            ours = fit_epochs(sizes, loader, SHORT_EPOCHS, loader if evaluates else None)
            name = "end of an epoch of fit" + (", with an evaluation" if evaluates else "")
            # the mean: what is put off to a later epoch counts, too
            add(name, "ms", 5.0, 1e3 * statistics.mean(ours), 1e3 * statistics.mean(hand))
    return list(rows.values())


def random_data(sizes: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` random examples."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, sizes[0]), np.float32)
    return x, rng.integers(sizes[-1], size=count, dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=[*SIZES, "limits"], help="only this size, or only the limits")
    args = parser.parse_args()
    if args.case in (None, "limits"):
        print(f"tiny ({jax.devices()[0].device_kind}), everything on: median over rounds, least run, limit")
        print(*measure_limits(args.rounds), sep="\n")
    for name in SIZES if args.case is None else {args.case} & SIZES.keys():
        sizes, batch_size, batches = SIZES[name]
        data = random_data(sizes, batch_size * batches)
        loader = jt.ArrayLoader(data, batch_size, shuffle=True, drop_last=True)
        rounds = [{kind: run(sizes, loader) for kind, run in VARIANTS.items()} for _ in range(args.rounds)]
        print(f"{name} ({jax.devices()[0].device_kind}), µs per step, ratio to linen by hand, |params|")
        for kind in VARIANTS:
            micro = statistics.median(one[kind][0] for one in rounds) / batches * 1e6
            ratio = statistics.median(one[kind][0] / one["linen by hand"][0] for one in rounds)
            print(f"  {kind:<40}{micro:>9.0f}{ratio:>8.2f}{rounds[0][kind][1]:>11.4f}")


if __name__ == "__main__":
    main()
