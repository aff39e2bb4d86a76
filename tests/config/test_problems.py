import copy

from jax_trainer.config import ConfigError, ConfigProblem, Location
from jax_trainer.config.problems import MAX_PROBLEMS, Problems, shown
from jax_trainer.config.settings import SettingsError
from jax_trainer.diagnostics.suggestions import nearest, suggestion
from tests.rows import each

HERE = Location("f.yaml", 3)


def test_an_error_tells_all_problems_once_in_the_order_of_their_places():
    problems = [
        ConfigProblem(Location("f.yaml", 10), "a.b", "second."),
        ConfigProblem(HERE, "", "first."),
        ConfigProblem(Location("command line"), "c", "zeroth."),
        ConfigProblem(HERE, "", "first."),
    ]
    error = ConfigError(problems)
    assert str(error).splitlines() == ["command line: c: zeroth.", "f.yaml:3: first.", "f.yaml:10: a.b: second."]
    assert error.problems[2].as_data() == {"file": "f.yaml", "line": 10, "key": "a.b", "problem": "second."}


def test_problems_beyond_a_hundred_are_counted():
    problems = Problems()
    for line in range(250):
        problems.add(Location("f.yaml", line + 1), "a", "wrong.")
    error = problems.error()
    assert len(problems) == 250
    assert len(error.problems) == MAX_PROBLEMS == 100
    assert str(error).splitlines()[-1] == "… and 150 more problems."


def test_errors_can_be_copied_as_other_processes_do():
    problems = Problems()
    for line in range(101):
        problems.add(Location("f.yaml", line), "a", "wrong.")
    for error in (problems.error(), SettingsError([("a", "wrong.")])):
        again = copy.deepcopy(error)
        assert str(again) == str(error)
        assert again.problems == error.problems


def test_an_error_cannot_move_the_cursor_of_a_terminal():
    error = ConfigError([ConfigProblem(HERE, "a\n\x1b[2Jb", "got \x1b[31m\u202e\ud800.\nAnd more.")])
    assert str(error) == "f.yaml:3: a\\n\\x1b[2Jb: got \\x1b[31m\\u202e\\ud800.\nAnd more."
    str(error).encode()


def test_an_error_is_short():
    error = ConfigError([ConfigProblem(HERE, "a" * 10_000, "b" * 10_000)])
    assert len(str(error)) < 4_100


@each(
    "value, words",
    [(None, "null"), (True, "true"), (1.5, "1.5"), ("1", "'1'"), ([1, "a"], "[1, 'a']"), ("x" * 100, f"'{'x' * 78}…")],
)
def test_a_value_is_shown_in_a_few_words(value, words):
    assert shown(value) == words


def test_a_secret_is_not_shown():
    assert shown("hunter2", "printer.token") == shown(5, "a.password.0") == "<hidden>"
    assert shown({"token": "hunter2"}) == "{'token': '<hidden>'}"
    assert shown("x hunter2", secrets=["hunter2"]) == "'x <hidden>'"


@each(
    "word, meant",
    [
        ("learning_rat", "learning_rate"),
        ("laerning_rate", "learning_rate"),
        ("learningRate", "learning_rate"),
        ("learning-rate", "learning_rate"),
        ("lerning_raet", "learning_rate"),
        ("momentun", "momentum"),
        ("weights", ""),
        ("x", ""),
        ("", ""),
        ("_", ""),
        ("momentum", ""),
        ("m" * 1000, ""),
    ],
)
def test_a_word_that_is_nearly_known_is_taken_for_it(word: str, meant: str):
    known = ["learning_rate", "momentum", "b1", "b2"]
    assert nearest(word, known) == meant
    assert suggestion(word, known) == (f" Did you mean `{meant}`?" if meant else "")


def test_suggestions_end_before_they_take_long():
    problems = Problems()
    known = [f"key{number}" for number in range(5_000)]
    answers = [problems.suggestion(f"kez{number}", known) for number in range(200)]
    assert answers[0] == " Did you mean `key0`?"
    assert answers[-1] == ""
