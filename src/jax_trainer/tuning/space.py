"""Reads a search space from a YAML file or a dict; reports all problems at once, with their lines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_trainer.config import ConfigError, Location
from jax_trainer.config.files import read_dotted
from jax_trainer.config.nodes import Node
from jax_trainer.config.problems import Problems, shown
from jax_trainer.settings import plain
from jax_trainer.tuning.dimensions import Space
from jax_trainer.tuning.entries import read_dimension


def read_space(source: str | Path | Mapping[str, Any]) -> Space:
    """Reads a search space from a YAML file or a dict: a list or a range for each dotted key of the experiment.

    >>> read_space({"model.c_hid": {"low": 8, "high": 64, "step": 8}, "optimizer.class_name": ["AdamW", "SGD"]}).data()
    {'model.c_hid': {'low': 8, 'high': 64, 'step': 8, 'log': False}, 'optimizer.class_name': ['AdamW', 'SGD']}
    """
    space, problems = readable_space(source)
    if problems:
        raise problems.error()
    return space


def readable_space(source: str | Path | Mapping[str, Any]) -> tuple[Space, Problems]:
    """The valid dimensions of a space, and the problems of the others."""
    problems = Problems()
    tree = _as_node(source) if isinstance(source, Mapping) else read_dotted(Path(source), problems)
    if not problems and not tree.section:
        found = "nothing" if tree.value in (None, {}) else shown(tree.data())
        text = f"expected keys of the experiment, such as `optimizer.learning_rate: {{…}}`, found {found}."
        problems.add(tree.location, "", text)
    read = [read_dimension(key, node, problems) for key, node in tree.section.items()]
    return Space(tuple(one for one in read if one is not None)), problems


def with_problems(problems: Problems, error: ConfigError) -> ConfigError:
    """The problems of a space and of the experiment, without those that follow from invalid dimensions."""
    unread = [problem.key for problem in problems]
    others = [one for one in error.problems if not any(_are_related(one.key, key) for key in unread)]
    return ConfigError([*problems, *others], more=error.more)


def _are_related(key: str, other: str) -> bool:
    """Whether one of two dotted keys equals or contains the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _as_node(data: Any) -> Node:
    location = Location("space")
    if isinstance(data, Mapping):
        return Node({str(name): _as_node(value) for name, value in data.items()}, location)
    return Node([_as_node(value) for value in data] if isinstance(data, list | tuple) else plain(data), location)
