import numpy as np
import pytest

from jax_trainer.callbacks.monitored import best_mode, monitored


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [
        ("val/acc", "max"),
        ("val/top5_accuracy", "max"),
        ("val/F1", "max"),
        ("val/auc", "max"),
        ("val/loss", "min"),
        ("val/accumulated_loss", "min"),
        ("val_acc/perplexity", "min"),
    ],
)
def test_auto_goes_by_the_name_of_the_metric(monitor, mode):
    assert best_mode("auto", monitor) == mode
    assert best_mode("max", monitor) == "max"


def test_a_metric_that_is_not_there_is_an_error_that_lists_those_which_are():
    with pytest.raises(ValueError, match="No metric 'val/f1' to monitor. There are: val/acc, val/loss."):
        monitored({"val/loss": 1.0, "val/acc": 0.5}, "val/f1")
    with pytest.raises(ValueError, match="There are: none."):
        monitored({}, "val/f1")


def test_an_array_cannot_be_monitored():
    with pytest.raises(ValueError, match=r"`monitor: val/m` must name a number, .* an array of shape \(2, 2\)"):
        monitored({"val/m": np.zeros((2, 2))}, "val/m")
    assert monitored({"val/m": np.float32(0.5)}, "val/m") == 0.5
