"""Warns if all gradients of the first step are zero."""

import logging

from jax_trainer.core.metric_window import MetricWindow

LOG = logging.getLogger("jax_trainer")
_NORM = "optimizer/grad_global_norm"


def warn_of_zero_gradients(rows: MetricWindow) -> None:
    """Logs a warning if the gradients of step 1 are zero; no error, because a fully masked batch has none."""
    if rows.first == 1 and _NORM in rows.format.metrics and (rows.values_of(_NORM)[:1] == 0).all():
        LOG.warning(
            "The gradients of all parameters were zero in step 1. Check that the loss depends on the outputs of the "
            "model: a constant, `argmax`, a comparison, `jax.lax.stop_gradient` and a softmax over one output have "
            "no gradient."
        )
