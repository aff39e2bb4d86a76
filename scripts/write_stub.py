"""Writes what type checkers read instead of names that are made when they are used: the exports, and the options.

python scripts/write_stub.py
"""

import ast
import inspect
from pathlib import Path

import jax_trainer
from jax_trainer.runs import options

PACKAGE = Path(jax_trainer.__file__).parent


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


def options_stub() -> str:
    """The text of the stub of `TrainOptions`: the fields of all sections as keywords."""
    tree = ast.parse(inspect.getsource(options))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    leaves = [
        f"    {ast.unparse(node.target)}: {ast.unparse(node.annotation)}"
        for section in options.SECTIONS
        for node in classes[section.__name__].body
        if isinstance(node, ast.AnnAssign)
    ]
    first = tree.body.index(classes[options.SECTIONS[0].__name__])
    header = [ast.unparse(node) for node in tree.body[1:first]]
    return "\n".join(
        [
            '"""The keywords of all options; written by `scripts/write_stub.py` from `options.py`."""',
            "",
            "from typing import TypedDict",
            *header,
            "",
            "class TrainOptions(TypedDict, total=False):",
            *leaves,
            "",
        ]
    )


STUBS = {PACKAGE / "__init__.pyi": stub, PACKAGE / "runs" / "train_options.pyi": options_stub}

if __name__ == "__main__":
    for file, text in STUBS.items():
        file.write_text(text(), encoding="utf-8")
