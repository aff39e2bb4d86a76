"""Values that JSON cannot represent."""

import math
from typing import Any


def finite(data: Any) -> Any:
    """`data` with NaN and infinity as text; as in `metrics.jsonl`.

    >>> finite({"loss": float("nan"), "acc": [0.5]})
    {'loss': 'nan', 'acc': [0.5]}
    """
    if isinstance(data, dict):
        return {name: finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
