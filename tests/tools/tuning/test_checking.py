import re
import time
from pathlib import Path

import pytest

from jax_trainer.config import ConfigError
from jax_trainer.tools.tuning import read_space, tune
from jax_trainer.tools.tuning.objectives import checked
from jax_trainer.tools.tuning.space import as_overrides
from jax_trainer.trainer import load_experiment
from tests.tools.tuning.tuning_runs import ROOT, TINY, space_file, tiny_file


def check(folder: Path, space: str, *overrides: str, experiment: str = TINY) -> list[str]:
    """What is wrong with a space for the tiny experiment."""
    file = tiny_file(folder, experiment)
    read = read_space(space_file(folder, space))
    try:
        checked(read, lambda values: load_experiment(file, [*overrides, *as_overrides(values)]))
    except ConfigError as error:
        return str(error).replace(f"{folder}/", "").splitlines()
    return []


def test_what_can_be_tried_is_accepted(tmp_path: Path, subtests):
    for number, space in enumerate(
        [
            "optimizer.learning_rate.peak_value: {low: 1e-4, high: 1e-1, log: true}",
            "model.c_hid: {low: 8, high: 64}",
            "optimizer.class_name: [AdamW, Lion]",
            "trainer.num_classes: [10, 11]",  # the model refers to it
            "optimizer: [{class_name: SGD, learning_rate: 0.1}, {class_name: Lion, learning_rate: 1e-3}]",
            "optimizer: [{class_name: SGD}, {class_name: Lion}]\noptimizer.learning_rate: {low: 0.1, high: 0.2}",
            "optimizer.learning_rate: [1e-3, {class_name: ConstantSchedule}]",
            "optimizer.weight_decay: {low: 0, high: 1, step: 1}",
            "trainer.ema: [null, 0.9]",
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(space=space):
            assert check(folder, space) == []


def test_the_spaces_that_we_show_fit_the_digits(tmp_path: Path, subtests):
    for number, page in enumerate(["src/jax_trainer/configs/spaces/digits.yaml", "docs/guides/tuning.md"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(page=page):
            text = (ROOT / page).read_text()
            [space] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) or [text]
            digits = (ROOT / "src/jax_trainer/configs" / "digits.yaml").read_text()
            assert (
                check(folder, space, "model={class_name: SimpleClassifier, num_classes: 10}", experiment=digits) == []
            )
            if page.endswith(".yaml"):
                assert check(folder, space, experiment=digits) == []


def test_what_the_experiment_lacks_may_be_in_the_space(tmp_path: Path):
    without = TINY.replace("  global_batch_size: 32\n", "").replace("  class_name: DigitsDataset\n", "")
    assert check(tmp_path, "dataset.class_name: [DigitsDataset]", experiment=without + "  seed: 1\n") == []


def test_what_cannot_be_tried_is_reported_with_its_line(tmp_path: Path, subtests):
    for number, (space, expected) in enumerate(
        [
            (
                "# rates\nmodel.c_hidd: {low: 8, high: 64}",
                ["space.yaml:2: model.c_hidd: SimpleClassifier has no key `c_hidd`. Did you mean `c_hid`?"],
            ),
            (
                "optimzer.learning_rate: [1e-3]",
                ["space.yaml:1: optimzer: Experiment has no key `optimzer`. Did you mean `optimizer`?"],
            ),
            (
                "model.c_hid: {low: 0, high: 64}",
                ["space.yaml:1: model.c_hid: expected an integer of at least 1, found 0."],
            ),
            (
                "trainer.ema: {low: 0.5, high: 1.5}",
                ["space.yaml:1: trainer.ema: expected a number of at least 0 and below 1 or null, found 1.5."],
            ),
            ("model.c_hid: [8, 16.5]", ["space.yaml:1: model.c_hid: expected an integer of at least 1, found 16.5."]),
            (
                "model.act_fn: [relu, gleu]",
                ["space.yaml:1: model.act_fn: expected one of elu, gelu, "],
            ),
            (
                "optimizer.class_name: [AdamW, Lionn]",
                ["space.yaml:1: optimizer.class_name: expected one of "],
            ),
            (
                "optimizer.class_name: [AdamW, SGD]",
                ["tiny.yaml:14: optimizer.weight_decay: SGD has no key `weight_decay`."],
            ),
            (
                "optimizer.weight_decay: {low: 0, high: 1}",
                ["space.yaml:1: optimizer.weight_decay: 0 and 1 are integers"],
            ),
            (
                "optimizer.weight_decay.x: [1]",
                ["space.yaml:1: optimizer.weight_decay.x: `x` cannot be set inside a scalar (tiny.yaml:14)."],
            ),
            (
                "model.c_hid: [8, x]\ntrainer.train_epochs: {low: 1, high: 3}\nmodel.nope: [1]",
                ["space.yaml:1: model.c_hid: ", "space.yaml:3: model.nope: SimpleClassifier has no key `nope`."],
            ),
            (
                "model.c_hid: [8, x]\ntrainer.train_epochs: [1, 0]",
                [
                    "space.yaml:1: model.c_hid: ",
                    "space.yaml:2: trainer.train_epochs: expected an integer of at least 1",
                ],
            ),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(space=space):
            problems = check(folder, space)
            assert len(problems) == len(expected)
            for one, start in zip(problems, expected, strict=True):
                assert one.startswith(start), one


def test_a_value_that_makes_another_key_wrong_is_named(tmp_path: Path):
    [problems] = check(tmp_path, "optimizer.class_name: [AdamW, SGD]")
    assert problems.endswith("(Trying `optimizer.class_name: 'SGD'`.)")


def test_a_mistake_in_the_experiment_keeps_its_place(tmp_path: Path):
    wrong = TINY.replace("train_epochs: 3", "train_epochs: 1.5")
    [problems] = check(tmp_path, "model.c_hid: [8]", experiment=wrong)
    assert problems.startswith("tiny.yaml:3: trainer.train_epochs: ") and problems.endswith("found 1.5.")
    [problems] = check(tmp_path, "model.c_hid: [8]", "trainer.train_epochs=0")
    assert problems.startswith("command line: trainer.train_epochs: ") and problems.endswith("found 0.")


def test_checking_a_large_space_takes_about_a_second(tmp_path: Path):
    keys = [f"dataset.aux.k{number}: {{low: 0.0, high: 1.0}}" for number in range(30)]
    began = time.perf_counter()
    assert check(tmp_path, "\n".join([*keys, f"seed: {list(range(100))}"])) == []
    assert time.perf_counter() - began < 10  # generous for a busy machine; usually below 1


BAD = """\
optimizer.learning_rate.peak_value: {low: 1e-4, hihg: 1e-1}
model.c_hidd: [8, 16]
trainer.train_epochs: [0, 1.5, 2]
model.c_hid: {low: 64, high: 8}
optimizer.clas_name: [AdamW]
dataset.global_batch_size: [16, -4]
"""


def test_all_mistakes_of_a_space_come_at_once(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        tune(tiny_file(tmp_path), space_file(tmp_path, BAD), folder=tmp_path / "study", quiet=True)
    problems = [(problem.location.line, problem.key, problem.text) for problem in caught.value.problems]
    assert [(line, key) for line, key, _ in problems] == [
        (1, "optimizer.learning_rate.peak_value.hihg"),
        (1, "optimizer.learning_rate.peak_value"),
        (2, "model.c_hidd"),
        (3, "trainer.train_epochs"),
        (3, "trainer.train_epochs"),
        (4, "model.c_hid.low"),
        (5, "optimizer.clas_name"),
        (6, "dataset.global_batch_size"),
    ]
    texts = " ".join(text for *_, text in problems)
    assert all(word in texts for word in ("`high`", "`c_hid`", "found 0", "found 1.5", "`class_name`", "found -4"))


def test_what_an_unreadable_entry_would_have_given_is_not_missed(tmp_path: Path):
    without = TINY.replace("    peak_value: 1e-3\n", "")
    space = space_file(tmp_path, "optimizer.learning_rate.peak_value: {low: 1e-4}\n")
    with pytest.raises(ConfigError) as caught:
        tune(tiny_file(tmp_path, without), space, folder=tmp_path / "study", quiet=True)
    assert len(caught.value.problems) == 1
