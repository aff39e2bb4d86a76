"""The section `lora` of a trainer's configuration."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jax_trainer.config.settings import Above, AtLeast, Below, Problem, Settings
from jax_trainer.core import LoRA

Rank = Annotated[int, AtLeast(1)]


@dataclass
class LoRAConfig(Settings):
    """Low-rank adaptation: all parameters are frozen, and adapters of the selected ones are trained.

    Args:
        match: regular expression that must match the full dotted path of a parameter, such as `.*(query|value).kernel`.
        rank: rank of the adapters.
        alpha: the product of an adapter is scaled by `alpha / rank`.
        dropout: dropout rate of the inputs of adapters.
        rank_pattern: other ranks by regular expression; the first that matches a path counts.
        alpha_pattern: other values of `alpha`, in the same way.
        use_dora: train a magnitude for each output, too: weight-decomposed low-rank adaptation (DoRA).
        base_dtype: dtype of the frozen base in memory; null: that of the parameters.
        train: regular expression of parameters that are trained themselves, such as a new head: `.*classifier.*`.
        train_bn: update the running statistics of BatchNorms none of whose parameters train; otherwise they stay.
    """

    match: str
    rank: Rank = 16
    alpha: Annotated[float, Above(0)] = 32.0
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
    rank_pattern: dict[str, Rank] = field(default_factory=dict)
    alpha_pattern: dict[str, Annotated[float, Above(0)]] = field(default_factory=dict)
    use_dora: bool = False
    base_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    train: str = ""
    train_bn: bool = False

    def problems(self) -> Iterator[Problem]:
        """Reports patterns that are no regular expressions."""
        try:
            _ = self.lora
        except ValueError as error:
            yield "match", str(error)

    @property
    def lora(self) -> LoRA:
        """What the program uses."""
        values: dict[str, Any] = {name: getattr(self, name) for name in LoRA.__dataclass_fields__}
        return LoRA(**values)
