"""Adapters: a linen, nnx or functional model and a loss → `Program`. No other package depends on the model library."""

from jax_trainer.adapters.functions import PureLoss, StatefulLoss, function_program, stateful_program
from jax_trainer.adapters.linen import LinenLoss, LinenView, flax_state_program, linen_program
from jax_trainer.adapters.nnx import NnxLoss, nnx_program, write_back

__all__ = [
    "LinenLoss",
    "LinenView",
    "NnxLoss",
    "PureLoss",
    "StatefulLoss",
    "flax_state_program",
    "function_program",
    "linen_program",
    "nnx_program",
    "stateful_program",
    "write_back",
]
