"""A first step whose gradients are all zero, which trains nothing, is reported."""

import logging

from jax_trainer.core.metric_window import MetricWindow

LOG = logging.getLogger("jax_trainer")
_NORM = "optimizer/grad_global_norm"


def warn_of_zero_gradients(rows: MetricWindow) -> None:
    """One warning where the gradients of step 1 are zero. A batch that is masked as a whole has none, so no error."""
    if rows.first == 1 and _NORM in rows.format.metrics and (rows.values_of(_NORM)[:1] == 0).all():
        LOG.warning(
            "The gradients of all parameters were zero in step 1. Does the loss depend on what the model returns? A "
            "constant, `argmax`, a comparison and `jax.lax.stop_gradient` have no gradient, and neither has a softmax "
            "over one output."
        )
