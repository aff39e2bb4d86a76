"""`TrainOptions`: the keywords of all options; type checkers read the stub beside this file."""

from typing import Any, TypedDict, cast

from jax_trainer.config.settings import hints_of
from jax_trainer.runs.options import Options

TrainOptions = TypedDict("TrainOptions", cast(Any, hints_of(Options)), total=False)  # pyright: ignore[reportArgumentType]
TrainOptions.__doc__ = "The keywords of all options, for `**options: Unpack[TrainOptions]` in functions of one's own."
