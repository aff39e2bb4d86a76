from dataclasses import dataclass
from typing import Any

import optuna

from jax_trainer.config import config_from
from jax_trainer.config.settings import Settings
from jax_trainer.tools.tuning import Choice, Range, Space
from jax_trainer.tools.tuning.space import as_overrides

NUMBERS = [1, 1e-05, -0.0, 1e300, True, None]
VALUES = [*NUMBERS, "no", "1e-3", 'quo"te\\', "new\nline", "emoji 🎲", "", [1, [2.5]], {"a": None}]


@dataclass
class Holder(Settings):
    a: Any = 0


def test_a_value_comes_through_an_override_as_it_was(subtests):
    for value in VALUES:
        with subtests.test(value=value):
            made = config_from({}, Holder, as_overrides({"a": value})).a
            assert (made, type(made)) == (value, type(value))


def test_a_section_is_set_before_what_is_inside_of_it():
    given = {"optimizer.learning_rate.peak": 1, "optimizer": {"class_name": "SGD"}, "optimizer.learning_rate": 2}
    assert [text.partition("=")[0] for text in as_overrides(given)] == [
        "optimizer",
        "optimizer.learning_rate",
        "optimizer.learning_rate.peak",
    ]


def test_what_optuna_keeps_becomes_the_same_values_again():
    space = Space((Range("r", 0.0, 1.0), Choice("c", ([16], {"a": 1}, "text", None))))
    for value in ([16], {"a": 1}, "text", None):
        trial = optuna.trial.FixedTrial(space.stored({"r": 0.25, "c": value}))
        assert space.suggest(trial) == {"r": 0.25, "c": value}
        assert space.values(trial.params) == {"r": 0.25, "c": value}
    assert space.values({}) == {}  # a trial that ended before anything was chosen


def test_a_path_belongs_to_what_is_tuned_there(subtests):
    for path, owner in [
        ("model", "model.c"),
        ("model.c", "model.c"),
        ("model.c.x", "model.c"),
        ("model.cc", None),
        ("", None),
    ]:
        with subtests.test(path=path):
            found = Space((Choice("a", (1,)), Choice("model.c", (1,)))).owner(path)
            assert (None if found is None else found.key) == owner
