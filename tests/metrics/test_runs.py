"""Metrics of a run are those of all its examples, whatever the batches, micro-batches, chunks and devices are."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
import sklearn.metrics
from flax import nnx

from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import EpochEnd, Notice, Plan, SavePoint, evaluate, train_events
from jax_trainer.sharding import Layout, make_mesh
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import TrainerModule, load_experiment
from tests.metrics.metric_runs import EXAMPLES, assert_those_of_all, examples, loader, masked_program
from tests.rows import noted_row

sk: Any = sklearn.metrics  # its annotations are inferred from defaults

EXAMPLE = examples()[:9]
MASK = np.arange(EXAMPLES) % 3 > 0


def epoch_metrics(program: Any, data: Any, plan: Plan, at: Any = None) -> dict[str, Any]:
    options = {} if at is None else {"at": at}
    events = train_events(program, program.init(jax.random.key(0), EXAMPLE), data, plan, **options)
    return next(event.metrics for event in events if isinstance(event, EpochEnd))


# the last of five batches of 10 is ragged; micro-batches have 3, 3, 3 and 1
def test_the_metrics_of_an_epoch_are_those_of_all_examples_that_count():
    for micro_batches, steps_per_call, mask in [(1, 3, None), (4, 1, MASK)]:
        with noted_row(micro_batches, steps_per_call, mask):
            program = compile_program(masked_program(micro_batches=micro_batches), on_recompile="ignore")
            plan = Plan(max_epochs=1, steps_per_call=steps_per_call)
            assert_those_of_all(epoch_metrics(program, loader(10, mask), plan), mask)


def test_the_metrics_of_several_devices_are_those_of_all_examples():
    sizes: list[int] = []
    program = compile_program(masked_program(sizes), layout=Layout(mesh=make_mesh()), on_recompile="ignore")
    state = program.init(jax.random.key(0), EXAMPLE)
    assert_those_of_all(evaluate(program, state, {"val": loader(12)})["val"])
    assert (jax.device_count(), sizes) == (8, [16])  # 12 cannot be shared evenly


# targets in the shape of the outputs

EXPERIMENT = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 1
  num_classes: 4
  metrics:
    f1: {class_name: F1, multilabel: true}
    auroc: {class_name: AUROC, multilabel: true}
    Accuracy: {}
model: {class_name: MLP, num_classes: 4}
optimizer: {class_name: SGD}
dataset: {class_name: DigitsDataset}
"""


class OfRows(TrainerModule):
    """A trainer on pairs of arrays whose targets have the shape of the outputs."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        logits = self.model_apply(model, batch[0], train=train)
        loss = optax.sigmoid_binary_cross_entropy(logits, batch[1]).mean()
        return loss, self.compute_metrics(logits, batch[1])


def evaluated_rows(folder: Any, targets: np.ndarray, *names: str) -> tuple[dict[str, Any], np.ndarray]:
    """What a trainer with these metrics of a file reports, in micro-batches; its outputs."""
    file = folder / "run.yaml"
    file.write_text(EXPERIMENT)
    metrics = load_experiment(file).value.trainer.metrics
    inputs = examples().input[:24]
    batches = [(inputs[at : at + 6], targets[at : at + 6].astype(np.float32)) for at in range(0, 24, 6)]
    trainer = OfRows(
        model=nnx.Linear(3, 4, rngs=nnx.Rngs(0)),
        optimizer=optax.sgd(0.1),
        exmp_input=batches[0],
        metrics={name: metrics[name] for name in names},
        train_epochs=1,
        accumulate=2,
        enable_progress_bar=False,
        logger={"log_dir": str(folder)},
    )
    results = trainer.train_model(batches, batches)
    return results[1], np.asarray(trainer.predict(batches, which="last"))


def test_a_trainer_reports_the_metrics_of_several_labels_from_a_file(tmp_path):
    labels = np.random.default_rng(0).integers(0, 2, (24, 4))
    found, logits = evaluated_rows(tmp_path, labels, "f1", "auroc")
    assert found["val/f1"] == pytest.approx(sk.f1_score(labels, logits > 0, average="macro"))
    assert found["val/auroc"] == pytest.approx(sk.roc_auc_score(labels, logits), rel=1e-6)


def test_a_trainer_reports_the_metrics_of_one_hot_targets(tmp_path):
    classes = np.random.default_rng(0).integers(0, 4, 24)
    found, logits = evaluated_rows(tmp_path, np.eye(4)[classes], "Accuracy")
    assert found["val/Accuracy"] == pytest.approx((logits.argmax(-1) == classes).mean())


def test_a_trainer_refuses_several_labels_without_a_choice(tmp_path):
    labels = np.random.default_rng(0).integers(0, 2, (24, 4))
    with pytest.raises(ValueError, match=r"`multilabel=True`.*`targets.argmax\(-1\)`") as error:
        evaluated_rows(tmp_path, labels, "Accuracy")
    assert any("'Accuracy'" in note for note in error.value.__notes__)


# resuming


def states_of_an_epoch(data: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The loop state of every save point up to the end of an epoch, as a checkpoint has it, and its metrics."""
    program = compile_program(masked_program(), on_recompile="ignore")
    found: list[Any] = []
    plan = Plan(max_epochs=1, saves=(), metrics_every=2)
    for event in train_events(program, program.init(jax.random.key(0), EXAMPLE), data, plan):
        if isinstance(event, SavePoint):
            found.append(event.loop_state)
        if isinstance(event, EpochEnd):
            return [(state, event.metrics) for state in found]
    raise AssertionError


def test_a_run_that_resumes_after_the_last_step_of_an_epoch_computes_its_metrics():
    for is_traced in [True, False]:
        with noted_row(is_traced):
            (loop_state, expected), *_ = states_of_an_epoch(loader(9))
            assert loop_state.position.epoch_step == 5
            assert not loop_state.has_ended
            program = compile_program(masked_program(), on_recompile="ignore")
            if is_traced:  # as trainers do before a run
                program.shapes(jax.random.key(0), EXAMPLE)
            assert_same_bits(epoch_metrics(program, loader(9), Plan(max_epochs=1), loop_state), expected)


def test_metrics_that_cannot_be_computed_after_resuming_are_left_out_with_a_notice():
    batches = [examples()[start : start + 9] for start in range(0, EXAMPLES, 9)]
    (loop_state, expected), *_ = states_of_an_epoch(iter(batches))
    program = compile_program(masked_program(), on_recompile="ignore")
    state = program.init(jax.random.key(0), EXAMPLE)
    events = [*train_events(program, state, Data(iter(batches)), Plan(max_epochs=1), loop_state)]
    (end,) = [event for event in events if isinstance(event, EpochEnd)]
    assert expected.keys() - end.metrics.keys() == {"f1", "matrix", "auroc", "r2"}
    assert [event for event in events if isinstance(event, Notice) and "auroc" in event.text]
