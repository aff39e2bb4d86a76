"""The code of the document about training loops runs unchanged, with only its imports changed."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import FrozenDict

from jax_trainer.styles.checkpoints import Checkpoint, Summary
from jax_trainer.testing import assert_same_bits

# what the document imports, from where it is here
IMPORTS = """\
import jax
from jax import numpy as jnp
import optax
from redex import combinator as cb
from jax_trainer import random
from jax_trainer import TrainLoop, TrainTask
from jax_trainer import EvalLoop, EvalTask
from jax_trainer import (
    SummaryLogger,
    SummaryWriter,
    CheckpointFileReader,
    CheckpointFileWriter,
    LowestCheckpointFileWriter,
)
from jax_trainer.models import RNNLM
"""

ITERATING = """\
for checkpoint in train_loop:
    pass
"""

CHECKPOINT = """\
class Checkpoint:
    ## Model variables.
    model_params: FrozenDict
    model_state: FrozenDict
    ## Optimizer state.
    optimizer_state: optax.OptState
    ## Training statistics.
    grads: FrozenDict
    loss: float
    n_completed_steps: int
    elapsed_time: float
    step: int
"""

TRAIN_LOOP = """\
train_loop = TrainLoop(
    init=model().init,
    task=TrainTask(
        apply=model().apply,
        optimizer=optax.sgd(learning_rate=0.1),
        loss=categorical_cross_entropy,
        data=train_datastream,
    ),
    n_steps_per_checkpoint=25,
    n_steps=100,
)
"""

NEXT_STEP = """\
checkpoint = train_loop.next_step()
"""

NEXT_CHECKPOINT = """\
checkpoint = train_loop.next_checkpoint()
"""

MORE_STEPS = """\
for checkpoint in train_loop(n_steps=200):
    pass
"""

EVALUATING = """\
for checkpoint in train_loop:
    summary = eval_loop(checkpoint)
"""

SUMMARY = """\
Metrics = Mapping[str, float]

class Summary(Checkpoint):
    metrics: Mapping[str, Metrics]
"""

EVAL_LOOP = """\
EvalLoop(
    task=EvalTask(
        apply=model().apply,
        metrics=dict(lnpp=categorical_cross_entropy),
        data=eval_datastream,
    ),
    n_steps=10,
)
"""

LOGGING = """\
logger = SummaryLogger()

for checkpoint in train_loop:
    summary = eval_loop(checkpoint)
    _ = logger(summary)
"""

TENSORBOARD = """\
summary_writer = SummaryWriter(output_dir="/tmp/tensorboard")

for checkpoint in train_loop:
    summary = eval_loop(checkpoint)
    _ = summary_writer(summary)
"""

WRITING = """\
checkpoint_writer = CheckpointFileWriter(output_dir="/tmp/checkpoints")

for checkpoint in train_loop:
    _ = checkpoint_writer(checkpoint)
"""

READING = """\
train_loop = TrainLoop(
    init=CheckpointFileReader(
        dir="/tmp/checkpoints",
        target=model().init,
    ),
    ...
)
"""

WRITING_THE_LOWEST = """\
checkpoint_writer = LowestCheckpointFileWriter(
    output_dir="/tmp/checkpoints",
    metric="lnpp",
)

for checkpoint in train_loop:
    _ = checkpoint_writer(checkpoint)
"""

READING_THE_LOWEST = """\
train_loop = TrainLoop(
    init=LowestCheckpointFileReader(
        dir="/tmp/checkpoints",
        target=model().init,
        metric="lnpp",
    ),
    ...
)
"""

REPORT = """\
A checkpoint was loaded in 0.02 seconds.
Total model initialization time is 9.53 seconds.
The lowest value for the metric eval/lnpp is set to 5.54797554.
Total number of trainable weights: 657920 ~ 2.5 MB.

Step      7: Ran 1 train steps in 15.91 seconds
Step      7: train seconds_per_step | 15.90994287
Step      7: train gradients_l2norm | 0.00417352
Step      7: train   weights_l2norm | 19.82766914
Step      7: train             loss | 7.84606361
Step      7: eval              lnpp | 5.54795837
"""

COMPLETE = """\
MAX_LENGTH = 256
BATCH_SIZE = 32
VOCAB_SIZE = 2 ** 8
D_MODEL = 128

model = RNNLM

collections = dict(
    init=["params","carry","dropout"],
    apply=["params","carry","dropout"],
)
config = dict(
    vocab_size=VOCAB_SIZE,
    d_model=D_MODEL,
    n_layers=2,
)

def presudo_data_steam(shape, bounds, rnkey):
    minval, maxval = bounds
    while True:
        x = jax.random.uniform(
            key=rnkey,
            shape=shape,
            minval=minval,
            maxval=maxval,
        ).astype(jnp.int32)
        yield x, x

def categorical_cross_entropy(outputs, targets):
    n_categories = outputs.shape[-1]
    loss = optax.softmax_cross_entropy(
        outputs,
        jax.nn.one_hot(targets, n_categories),
    )
    return jnp.mean(loss)

rnkeyg = random.sequence(seed=0)
train_datag = presudo_data_steam(shape=(BATCH_SIZE,MAX_LENGTH), bounds=(1,VOCAB_SIZE), rnkey=next(rnkeyg))
eval_datag = presudo_data_steam(shape=(BATCH_SIZE,MAX_LENGTH), bounds=(1,VOCAB_SIZE), rnkey=next(rnkeyg))

train_loop = TrainLoop(
    init=CheckpointFileReader(dir="/tmp/checkpoints", target=model(**config).init),
    task=TrainTask(
        apply=model(**config | dict(deterministic=False)).apply,
        optimizer=optax.sgd(learning_rate=0.1, momentum=0.9),
        loss=categorical_cross_entropy,
        data=train_datag,
    ),
    collections=collections,
    mutable_collections=True,
    n_steps_per_checkpoint=3,
    rnkey=next(rnkeyg),
    n_steps=8,
)

process_checkpoint = cb.serial(
    EvalLoop(
        task=EvalTask(
            apply=model(**config).apply,
            metrics=dict(lnpp=categorical_cross_entropy),
            data=eval_datag,
        ),
        collections=collections,
        rnkey=next(rnkeyg),
        n_steps=2,
    ),
    SummaryLogger(),
    SummaryWriter(output_dir="/tmp/tensorboard"),
    CheckpointFileWriter(output_dir="/tmp/checkpoints"),
    LowestCheckpointFileWriter(output_dir="/tmp/checkpoints", metric="lnpp"),
)

for checkpoint in train_loop:
    _ = process_checkpoint(checkpoint)
"""


class Classifier(nn.Module):
    """What the short examples call `model`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3)(x)


def categorical_cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy(outputs, jax.nn.one_hot(targets, outputs.shape[-1])).mean()


def datastream() -> Iterator[Any]:
    rng = np.random.default_rng(0)
    for _ in itertools.count():
        x = rng.normal(size=(4, 3)).astype(np.float32)
        yield x, x.argmax(-1)


def do(code: str, namespace: dict[str, Any]) -> None:
    exec(compile(code, "document 004", "exec"), namespace)


@pytest.mark.parametrize(("code", "ours"), [(CHECKPOINT, Checkpoint), (SUMMARY, Summary)])
def test_checkpoints_have_the_fields_of_the_document(code: str, ours: Any):
    namespace = {"FrozenDict": FrozenDict, "optax": optax, "Mapping": Mapping, "Checkpoint": Checkpoint}
    do(code, namespace)
    wanted = list(namespace[ours.__name__].__annotations__)
    assert [item.name for item in fields(ours) if item.name in wanted] == wanted
    assert issubclass(ours, Checkpoint)


@pytest.mark.example
def test_the_short_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    namespace: dict[str, Any] = {
        "model": Classifier,
        "categorical_cross_entropy": categorical_cross_entropy,
        "train_datastream": datastream(),
        "eval_datastream": datastream(),
    }
    do(IMPORTS + "from jax_trainer import LowestCheckpointFileReader", namespace)

    def run(code: str) -> Any:
        do(code.replace('"/tmp/', f'"{tmp_path}/'), namespace)
        return namespace.get("checkpoint")

    def further(code: str) -> None:
        namespace["train_loop"].n_steps += 25
        assert run(code).step == namespace["train_loop"].n_steps

    run(TRAIN_LOOP)
    assert run(ITERATING).step == 100
    assert run(NEXT_STEP).step == 101
    assert run(NEXT_CHECKPOINT).step == 125
    assert run(MORE_STEPS).step == 200
    run("eval_loop = " + EVAL_LOOP)
    namespace["train_loop"].n_steps = 200
    for code in (EVALUATING, LOGGING, TENSORBOARD, WRITING):
        further(code)
    assert set(namespace["summary"].metrics) == {"train", "eval"}
    assert "Step    250: eval              lnpp |" in capsys.readouterr().out
    assert list((tmp_path / "tensorboard").iterdir())
    further(WRITING_THE_LOWEST)  # which the document passes a checkpoint without metrics
    assert "`writer(eval_loop(checkpoint))`" in caplog.text
    further(WRITING_THE_LOWEST.replace("(checkpoint)", "(eval_loop(checkpoint))"))
    rest = "task=TrainTask(model().apply, optax.sgd(0.1), categorical_cross_entropy, datastream())"
    namespace["datastream"] = datastream
    for code, step in ((READING, 300), (READING_THE_LOWEST, 350)):
        run(code.replace("...", rest))
        assert namespace["train_loop"].step == step


def without_numbers(report: str) -> list[str]:
    """The lines of a report; the model of the shrunk example is some kB large."""
    return [re.sub(r"\d+(\.\d+)?", "#", line).replace("kB", "MB") for line in report.splitlines()]


def complete(code: str, folder: Path, n_steps: int) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    do(IMPORTS + code.replace('"/tmp/', f'"{folder}/').replace("n_steps=8", f"n_steps={n_steps}"), namespace)
    return namespace


@pytest.mark.example
def test_the_complete_example_runs_resumes_and_reports_as_in_the_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code = COMPLETE.replace("MAX_LENGTH = 256", "MAX_LENGTH = 8").replace("D_MODEL = 128", "D_MODEL = 8")
    with_redex = complete(code, tmp_path, 8)
    assert with_redex["checkpoint"].step == 8
    steps = [line[:11] for line in capsys.readouterr().out.splitlines() if "Ran" in line]
    assert steps == ["Step      3", "Step      6", "Step      8"]
    with_ours = complete("from jax_trainer import serial\n" + code.replace("cb.serial", "serial"), tmp_path, 9)
    assert with_ours["checkpoint"].step == 9
    assert without_numbers(capsys.readouterr().out) == without_numbers(REPORT)


@pytest.mark.example
def test_the_complete_example_runs_in_its_full_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    complete(COMPLETE, tmp_path / "twice", 8)
    twice = complete(COMPLETE, tmp_path / "twice", 10)["checkpoint"]
    assert "Total number of trainable weights: 328960 ~ 1.3 MB." in capsys.readouterr().out
    once = complete(COMPLETE, tmp_path / "once", 10)["checkpoint"]
    assert_same_bits((twice.model_params, twice.optimizer_state), (once.model_params, once.optimizer_state))
