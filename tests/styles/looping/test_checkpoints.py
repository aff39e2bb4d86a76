"""A checkpoint says what training tells, and a summary adds to it."""

import numpy as np
import pytest

from jax_trainer.styles.checkpoints import Checkpoint, Summary, by_full_name, metrics_of, state_of, summarised

WEIGHTS = {"kernel": np.full((2, 2), 2.0, np.float32), "bias": np.full(9, 1.0, np.float32)}
GRADS = {"kernel": np.full((2, 2), 0.5, np.float32), "bias": np.zeros(9, np.float32)}
CHECKPOINT = Checkpoint(WEIGHTS, {}, (), GRADS, loss=0.5, n_completed_steps=4, elapsed_time=2.0, step=8)


def test_a_checkpoint_has_the_metrics_of_its_last_steps():
    assert metrics_of(CHECKPOINT) == {
        "train": {"seconds_per_step": 0.5, "gradients_l2norm": 1.0, "weights_l2norm": 5.0, "loss": 0.5}
    }


def test_a_summary_is_the_checkpoint_with_metrics_in_groups():
    summary = summarised(summarised(CHECKPOINT, "eval", {"acc": 0.5}), "held_out", {"acc": 0.25})
    assert isinstance(summary, Summary)
    assert (summary.step, summary.model_params, summary.loss) == (8, WEIGHTS, 0.5)
    assert list(summary.metrics) == ["train", "eval", "held_out"]
    assert by_full_name(summary)["held_out/acc"] == 0.25


def test_a_group_that_is_measured_again_has_the_new_metrics():
    summary = summarised(summarised(CHECKPOINT, "eval", {"acc": 0.5}), "eval", {"loss": 3.0})
    assert summary.metrics["eval"] == {"loss": 3.0}


def test_it_is_shown_in_one_line_without_its_arrays():
    assert repr(CHECKPOINT) == "Checkpoint(loss=0.5, n_completed_steps=4, elapsed_time=2.0, step=8)"


def test_a_checkpoint_that_no_loop_made_cannot_be_resumed():
    with pytest.raises(ValueError, match="step 8 has no `rng`"):
        state_of(CHECKPOINT)
