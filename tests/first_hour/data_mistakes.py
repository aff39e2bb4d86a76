"""Mistakes with data: shapes, dtypes, labels, empty sets, loaders."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import ArrayLoader, ImgClassifierTrainer
from jax_trainer.datasets import DataError
from jax_trainer.styles import EvalLoop, EvalTask, TrainLoop, TrainTask, train_fn
from tests.first_hour.mistakes import (
    IN_YOUR_CODE,
    LATE,
    STEP,
    VALIDATING,
    Net,
    Table,
    Trainer,
    X,
    Y,
    cross_entropy,
    loader,
    make_trainer,
    nnx_net,
    run_fit,
    run_loop,
    run_train_fn,
    run_trainer,
    train,
    train_step,
    val_step,
)

DATA = Table()
OF_BATCHES = ("TrainerModule", "train_fn", "TrainLoop")  # which do not take arrays of the complete dataset
NNX_STYLES = ("fit, nnx", "TrainerModule, nnx", "train_fn")
NAMES = np.array(["cat", "dog", "cow", "emu"] * 4)
WIDE = np.ones((16, 5), np.float32)


class Batches:
    """Some batches, as a loader of one's own gives them."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


# shapes


@DATA.each(
    "inputs of another width: inputs are wider than the model's first layer",
    "5",
    "4",
    r"float32\[8, ?5\]",
    IN_YOUR_CODE,
    styles=NNX_STYLES,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(WIDE))


@DATA.each(
    "inputs of another width: validation inputs are wider than those of training",
    "val",
    r"float32\[8, ?5\]",
    styles=VALIDATING,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, val=loader(WIDE))


@DATA.each("inputs of another rank: images where the model wants flat rows", r"float32\[8, ?2, ?2\]", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X.reshape(16, 2, 2)))


@DATA.row(
    "inputs and labels of different lengths: fit, inputs and labels of different lengths", "16", "15", error=ValueError
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X, Y[:15]))


@DATA.row(
    "inputs and labels of different lengths: ArrayLoader, inputs and labels of different lengths",
    "16",
    "15",
    error=ValueError,
)
def _(folder: Path) -> None:
    ArrayLoader((X, Y[:15]), 8)


@DATA.row(
    "inputs and labels of different lengths: fit, validation inputs and labels of different lengths",
    "16",
    "15",
    error=ValueError,
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y[:15]))


@DATA.each(
    "inputs and labels of different lengths: a batch whose inputs and labels have different lengths",
    r"float32\[8, ?4\]",
    r"int32\[7\]",
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=[(X[:8], Y[:7])])


@DATA.row("inputs of another rank: fit, labels with one axis too many", r"int32\[8, ?1\]", "squeeze")
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X, Y[:, None]))


@DATA.row("inputs of another rank: fit, a table of one feature without its axis", r"float32\[8\]", IN_YOUR_CODE)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X[:, 0], Y))


@DATA.row("batches that change: fit, batches of changing rank", r"\[8, ?4\]", "rank", "train", error=DataError, at=LATE)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[(X[:8], Y[:8]), (X[:8, None], Y[:8])])


@DATA.row("batches that change: fit, batches of changing keys", "label", "keys", error=DataError, at=LATE)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[{"x": X[:8], "y": Y[:8]}, {"x": X[:8], "label": Y[:8]}])


@DATA.row("inputs of another width: TrainerModule, an example batch of another width than the data", "5", "4", at=STEP)
def _(folder: Path) -> None:
    run_trainer(folder, loader(WIDE))


@DATA.row(
    "an example that is not a batch: TrainerModule, the example is the inputs alone", r"float32\[8, ?4\]", IN_YOUR_CODE
)
def _(folder: Path) -> None:
    run_trainer(folder, exmp_input=X[:8])


@DATA.row("an example that is not a batch: TrainerModule, no example batch", "exmp_input", error=TypeError)
def _(folder: Path) -> None:
    make_trainer(folder, exmp_input=...)


@DATA.row(
    "an example that is not a batch: TrainerModule, the example is a loader",
    "exmp_input",
    r"next\(iter",
    "ArrayLoader",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, exmp_input=loader())


# dtypes and labels


@DATA.each("data that is not numbers: labels are words", "dtype|str", "label|batch|1", error=DataError)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=[(X[:8], NAMES[:8])])


@DATA.row("data that is not numbers: ArrayLoader, labels are words", "U3", "[Nn]umber|numeric", error=DataError)
def _(folder: Path) -> None:
    ArrayLoader((X, NAMES), 8)


@DATA.row("data that is not numbers: fit, labels are words, as arrays", "U3", "[Nn]umber|numeric", error=DataError)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X, NAMES))


@DATA.row("data that is not numbers: fit, inputs of dtype object", "object", "[Nn]umber|numeric", error=DataError)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X.astype(object), Y))


@DATA.row(
    "data that is not numbers: fit, validation labels are words",
    "U3",
    "[Nn]umber|numeric",
    "val|test_ds",
    error=DataError,
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, NAMES))


@DATA.each(
    "labels of another dtype or shape: labels are floats for an integer cross entropy",
    r"float32\[8\]",
    "astype|integer|int",
    IN_YOUR_CODE,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, Y.astype(np.float32)))


@DATA.each(
    "labels of another dtype or shape: labels are one-hot for an integer cross entropy",
    r"float32\[8, ?3\]",
    "argmax|integer",
    IN_YOUR_CODE,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, np.eye(3, dtype=np.float32)[Y]))


@DATA.each("labels of another dtype or shape: labels are one-hot integers", r"int32\[8, ?3\]", "argmax|one-hot")
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, np.eye(3, dtype=np.int32)[Y]))


OUT_OF_RANGE = ("label", "3", r"0.*2|3 classes", "first|batch")


@DATA.each("labels out of range: labels count from 1", *OUT_OF_RANGE, at=LATE, never="Lower the learning rate")
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, Y + 1))


@DATA.each(
    "labels out of range: labels of more classes than outputs", "label", "9", at=LATE, never="Lower the learning rate"
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, np.where(Y == 2, 9, Y)))


@DATA.each("labels out of range: labels are -1 where unknown", "label", "-1", at=LATE, never="Lower the learning rate")
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, np.where(Y == 2, -1, Y)))


@DATA.each("NaN in the inputs", "batch", "0|input", "NaN|nan|finite", at=LATE, never="Lower the learning rate")
def _(style: str, folder: Path) -> None:
    x = X.copy()
    x[3, 1] = np.nan
    train(style, folder, data=loader(x))


@DATA.row(
    "data that is not numbers: fit, names beside the numbers of a batch", "name", "S1", "remove it", error=DataError
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[{"x": X[:8], "y": Y[:8], "name": np.array([b"a"] * 8)}])


# ragged and empty


@DATA.row("data that is not numbers: fit, ragged lists", "length", "train", error=DataError)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[([[1.0, 2.0], [3.0]], [0, 1])])


@DATA.each("no data: an empty list of batches", "train", "no batch|empty", error=DataError)
def _(style: str, folder: Path) -> None:
    if style.startswith("TrainerModule"):
        run_trainer(folder, [])
    else:
        train(style, folder, data=[])


@DATA.row("no data: fit, arrays without examples", "empty", error=ValueError)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X[:0], Y[:0]))


@DATA.row("no data: fit, validation arrays without examples", "val|test_ds", "0|no |empty", error=DataError)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X[:0], Y[:0]))


@DATA.row(
    "a batch size that does not fit: ArrayLoader, a batch larger than the data, the last one dropped",
    "32",
    "16",
    "drop_last",
    error=ValueError,
)
def _(folder: Path) -> None:
    ArrayLoader((X, Y), 32, drop_last=True)


@DATA.row("no data: TrainerModule, an empty validation loader", "val", "no batch|empty")
def _(folder: Path) -> None:
    run_trainer(folder, val=[])


@DATA.row("no data: TrainerModule, training data is None", "NoneType", "train", error=DataError)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(None)


@DATA.row("no data: train_fn, training data is None", "train_itr", error=TypeError)
def _(folder: Path) -> None:
    model = nnx_net()
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), None)


# loaders


@DATA.row(
    "a generator that is used up: fit, a generator for several epochs",
    "once|exhausted|used up",
    "function",
    "list",
    error=DataError,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=((X[:8], Y[:8]) for _ in range(2)), num_epochs=3)


@DATA.row(
    "a generator that is used up: TrainerModule, a generator for several epochs",
    "once",
    "function",
    "list",
    error=DataError,
)
def _(folder: Path) -> None:
    run_trainer(folder, ((X[:8], Y[:8]) for _ in range(2)), train_epochs=3)


@DATA.row(
    "a generator that is used up: train_fn, a generator that ends before n_steps",
    "train",
    "once",
    "list",
    at=LATE,
    error=DataError,
)
def _(folder: Path) -> None:
    run_train_fn(((X[:8], Y[:8]) for _ in range(2)), n_steps=5)


@DATA.row(
    "a generator that is used up: TrainLoop, a generator that ends before n_steps",
    "train",
    "end|once",
    at=LATE,
    error=DataError,
)
def _(folder: Path) -> None:
    run_loop(data=((X[:8], Y[:8]) for _ in range(2)), steps=5)


@DATA.row(
    "a generator that is used up: fit, a generator to validate on, again and again", "test_ds", "once", error=DataError
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=((X[:8], Y[:8]) for _ in range(2)), num_epochs=3)


@DATA.row(
    "single examples instead of batches: fit, a list of examples instead of batches",
    "single example",
    "batch",
    error=DataError,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=list(zip(X, Y, strict=True)))


@DATA.row(
    "single examples instead of batches: fit, a torch dataset instead of a loader",
    "single example",
    "DataLoader",
    error=DataError,
)
def _(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    run_fit(folder, train_ds=torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)))


@DATA.row(
    "something else instead of data: fit, the path of a file instead of data",
    "str",
    "train",
    error=(DataError, TypeError),
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds="data/train.csv")


@DATA.row(
    "something else instead of data: TrainerModule, the path of a file instead of a loader",
    "str",
    "train",
    error=(DataError, TypeError),
)
def _(folder: Path) -> None:
    run_trainer(folder, "data/train.csv")


@DATA.row(
    "arrays instead of a loader: fit, a list of arrays instead of a tuple",
    r"\(16, 4\), \(16,\)",
    "tuple",
    error=DataError,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[X, Y])


@DATA.row(
    "batches that are not inputs and targets: fit, batches with names of their own",
    "pixels",
    "split_batch",
    error=DataError,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[{"pixels": X[:8], "digit": Y[:8]}])


@DATA.row("batches that are not inputs and targets: fit, batches of three", "3", "split_batch", error=DataError)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[(X[:8], Y[:8], Y[:8])])


@DATA.row(
    "batches that are not inputs and targets: fit, split_batch returns one thing",
    "split_batch",
    r"\(inputs, targets\)",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, split_batch=lambda batch: batch[0])


@DATA.row("batches that are not inputs and targets: TrainLoop, batches are dicts", "pair", "x, y", error=DataError)
def _(folder: Path) -> None:
    run_loop(data=[{"x": X[:8], "y": Y[:8]}])


@DATA.row(
    "batches that are not inputs and targets: TrainerModule, a key that the batch does not have",
    "label",
    "input|target",
    IN_YOUR_CODE,
    error=KeyError,
)
def _(folder: Path) -> None:
    class Keyed(Trainer):
        def batch_to_input(self, batch: Any) -> Any:
            return batch["input"]

        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            logits, mutable = self.model_linen_apply(params, state, batch["input"], rng, train=train)
            return self.loss(logits, batch["labels"]), (mutable, {})

    batch = {"input": X[:8], "target": Y[:8]}
    run_trainer(folder, [batch], kind=Keyed, exmp_input=batch)


@DATA.row("a loader that fails: fit", "boom", "train", "batch", IN_YOUR_CODE, error=ValueError, at=LATE)
def _(folder: Path) -> None:
    class Broken:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            yield X[:8], Y[:8]
            raise ValueError("boom")

    run_fit(folder, train_ds=Broken())


@DATA.row(
    "something else instead of data: fit, a class of loaders instead of a loader", "class", error=(DataError, TypeError)
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=Batches)


@DATA.row(
    "a batch size that does not fit: ArrayLoader, a batch size of 0", "batch_size", "0", error=(ValueError, TypeError)
)
def _(folder: Path) -> None:
    ArrayLoader((X, Y), 0)


@DATA.row("a batch size that does not fit: fit, a batch size that is a float", "batch_size", r"8\.0", error=ValueError)
def _(folder: Path) -> None:
    run_fit(folder, batch_size=8.0)


@DATA.row(
    "inputs of another width: fit, predicting on inputs of another width", "5", "4|kernel", r"float32\[8, ?5\]", at=LATE
)
def _(folder: Path) -> None:
    run_fit(folder).predict(WIDE[:8])


@DATA.row(
    "inputs of another width: TrainerModule, testing on data of another width",
    "test",
    r"float32\[8, ?5\]",
    IN_YOUR_CODE,
    at=LATE,
)
def _(folder: Path) -> None:
    run_trainer(folder).test_model(loader(WIDE))


@DATA.row("inputs of another width: TrainerModule, predicting on data of another width", r"float32\[8, ?5\]", at=LATE)
def _(folder: Path) -> None:
    run_trainer(folder).predict(loader(WIDE))


@DATA.row("a list of loaders: fit, a list of loaders to validate on", "val", "loaders", "by name", error=DataError)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=[loader(), loader()])


@DATA.row("a list of loaders: TrainerModule, a list of loaders to train on", "train", "loaders", error=DataError)
def _(folder: Path) -> None:
    run_trainer(folder, [loader(), loader()])


@DATA.row(
    "a generator that is used up: train_fn, a generator to validate on, again and again",
    "val",
    "once",
    "list",
    error=DataError,
    at=LATE,
)
def _(folder: Path) -> None:
    run_train_fn(val=((X[:8], Y[:8]) for _ in range(1)), n_steps=3, eval_every_n_steps=1)


@DATA.row(
    "batches that are not inputs and targets: TrainLoop, batches without targets",
    "pair",
    "single array",
    error=DataError,
)
def _(folder: Path) -> None:
    run_loop(data=[X[:8]])


@DATA.row(
    "inputs of another width: TrainLoop, a sample of another width than the data",
    r"float32\[8, ?4\]",
    "width",
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    run_loop(input_sample=np.ones((1, 7), np.float32))


@DATA.row("no data: TrainerModule, testing on nothing", "data", error=ValueError)
def _(folder: Path) -> None:
    make_trainer(folder).test_model(None)


LATER = np.where(np.arange(16) == 12, 7, Y)  # wrong in the second batch only


@DATA.each(
    "a later label out of range: a label out of range in a later batch of arrays",
    "7",
    "0 to 2",
    at=STEP,
    never="Lower the learning rate",
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(X, LATER))


@DATA.row(
    "a later label out of range: fit, a label out of range in a later batch of a list",
    "7",
    "0 to 2",
    at=LATE,
    never="Lower the learning rate",
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=[(X[:8], LATER[:8]), (X[8:], LATER[8:])])


@DATA.row(
    "a later label out of range: fit, a label out of range in a later batch of a loader",
    "[Ll]abels",
    "0 to 2",
    r"batch\[1\]",
    at=LATE,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=Batches((X[:8], LATER[:8]), (X[8:], LATER[8:])))


@DATA.row(
    "batches that are not inputs and targets: ImgClassifierTrainer, batches that are pairs",
    "tuple",
    "SupervisedBatch",
    error=AttributeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=ImgClassifierTrainer, num_classes=3)


@DATA.row(
    "arrays instead of a loader: TrainerModule, a loader as the dataset", "dataset", "ArrayLoader", error=TypeError
)
def _(folder: Path) -> None:
    make_trainer(folder, dataset=loader())


@DATA.row(
    "labels of another dtype or shape: fit, labels are true and false",
    r"bool\[8\]",
    "astype",
    IN_YOUR_CODE,
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=(X, Y > 1))


# arrays of the complete dataset and single examples instead of batches


@DATA.each(
    "arrays instead of a loader: inputs and targets instead of a loader",
    "'train'",
    r"\(16, 4\), \(16,\)",
    "ArrayLoader",
    error=DataError,
    styles=OF_BATCHES,
)
def _(style: str, folder: Path) -> None:
    {"TrainerModule": lambda: run_trainer(folder, (X, Y)), "train_fn": lambda: run_train_fn((X, Y))}.get(
        style, lambda: run_loop(data=(X, Y))
    )()


@DATA.each(
    "single examples instead of batches: a list of single examples",
    "'train'",
    "single examples",
    "ArrayLoader",
    error=DataError,
    styles=OF_BATCHES,
)
def _(style: str, folder: Path) -> None:
    examples = [*zip(X, Y, strict=True)]
    {"TrainerModule": lambda: run_trainer(folder, examples), "train_fn": lambda: run_train_fn(examples)}.get(
        style, lambda: run_loop(data=examples)
    )()


@DATA.row(
    "arrays instead of a loader: fit, inputs and targets as two arguments, as in Keras",
    r"fit\(model, \(x, y\)",
    error=DataError,
)
def _(folder: Path) -> None:
    run_fit(folder, train_ds=X, test_ds=Y)


# labels of evaluation data


@DATA.each(
    "validation labels out of range: labels of the validation data that are out of range",
    "holds 3",
    "0 to 2",
    "'val'",
    styles=VALIDATING,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, val=loader(X, Y + 1))


@DATA.each(
    "validation labels out of range: a later label of the validation data that is out of range",
    "holds 7",
    "0 to 2",
    styles=VALIDATING[:4],
)
def _(style: str, folder: Path) -> None:
    labels = Y.copy()
    labels[-1] = 7
    train(style, folder, val=loader(X, labels))


@DATA.row("validation labels out of range: EvalLoop, labels out of range", "holds 3", "0 to 2", "'eval'", at=LATE)
def _(folder: Path) -> None:
    task = TrainTask(apply=Net().apply, optimizer=optax.sgd(0.1, momentum=0.9), loss=cross_entropy, data=loader())
    loop = TrainLoop(init=Net().init, task=task, n_steps=1, stdout=False)
    evaluating = EvalLoop(EvalTask(apply=Net().apply, metrics={"loss": cross_entropy}, data=loader(X, Y + 1)))
    for checkpoint in loop:
        evaluating(checkpoint)
