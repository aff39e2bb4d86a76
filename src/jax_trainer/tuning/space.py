"""Reads a space from a YAML file or from Python data: all that is wrong is told at once, with its line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_trainer.config import Place
from jax_trainer.config.files import read_dotted
from jax_trainer.config.nodes import Node
from jax_trainer.config.problems import Problems, shown
from jax_trainer.settings import plain
from jax_trainer.tuning.dimensions import Space
from jax_trainer.tuning.entries import read_dimension


def read_space(source: str | Path | Mapping[str, Any]) -> Space:
    """The space in a YAML file, or in a dict: dotted keys of the experiment, and what to try for each of them.

    >>> read_space({"model.c_hid": {"low": 8, "high": 64, "step": 8}, "optimizer.class_name": ["AdamW", "SGD"]}).data()
    {'model.c_hid': {'low': 8, 'high': 64, 'step': 8, 'log': False}, 'optimizer.class_name': ['AdamW', 'SGD']}
    """
    problems = Problems()
    tree = _as_node(source) if isinstance(source, Mapping) else read_dotted(Path(source), problems)
    if not problems and not tree.section:
        found = "nothing" if tree.value in (None, {}) else shown(tree.data())
        text = f"expected keys of the experiment, such as `optimizer.learning_rate: {{…}}`, found {found}."
        problems.add(tree.place, "", text)
    read = [read_dimension(key, node, problems) for key, node in tree.section.items()]
    if problems:
        raise problems.error()
    return Space(tuple(one for one in read if one is not None))


def _as_node(data: Any) -> Node:
    place = Place("space")
    if isinstance(data, Mapping):
        return Node({str(name): _as_node(value) for name, value in data.items()}, place)
    return Node([_as_node(value) for value in data] if isinstance(data, list | tuple) else plain(data), place)
