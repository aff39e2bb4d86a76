"""Writes `jax_trainer/__init__.pyi`, which type checkers read instead of the names that are imported when first used.

python scripts/write_stub.py
"""

from pathlib import Path

import jax_trainer

STUB = Path(jax_trainer.__file__).with_suffix(".pyi")


def stub() -> str:
    """The text of the stub."""
    imports = [
        f"from jax_trainer.{module} import {name}" for name, module in sorted(vars(jax_trainer)["_MODULE_OF"].items())
    ]
    return "\n".join(
        [
            '"""What type checkers read of `__init__.py`; written by `scripts/write_stub.py`."""',
            "",
            "from jax_trainer.adapters import flax_nnx",
            "from jax_trainer.core import random as core_random",
            *imports,
            "",
            "__version__: str",
            "",
            "nnx = flax_nnx",
            "random = core_random",
            "",
            f"__all__ = {jax_trainer.__all__!r}",
            "",
        ]
    )


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
