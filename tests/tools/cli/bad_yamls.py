"""Bad configurations with the parts of the message that each must give: location, key, expected, found, suggestion."""

from dataclasses import dataclass

from tests.tools.cli.cli_runs import TINY

FILE = "bad.yaml"


@dataclass(frozen=True)
class Bad:
    """The content of a file, overrides, and one entry for each problem: parts of the line about it."""

    name: str
    content: str | bytes
    expected: tuple[tuple[str, ...], ...]
    overrides: tuple[str, ...] = ()

    @property
    def as_bytes(self) -> bytes:
        """What stands in the file."""
        return self.content.encode() if isinstance(self.content, str) else self.content


def changed(old: str, new: str, text: str = TINY) -> str:
    """The tiny experiment with one place changed."""
    assert text.count(old) == 1
    return text.replace(old, new)


def _epochs(value: str, *parts: str, name: str) -> Bad:
    expected = (f"{FILE}:3: trainer.train_epochs: ", "expected an integer of at least 1", *parts)
    return Bad(name, changed("train_epochs: 2", f"train_epochs: {value}"), (expected,))


def _rate(value: str, found: str, *, name: str) -> Bad:
    expected = (
        f"{FILE}:17: optimizer.learning_rate.peak_value: ",
        "expected a number of at least 0",
        f"found {found}.",
    )
    return Bad(name, changed("peak_value: 1e-3", f"peak_value: {value}"), (expected,))


def _one(name: str, content: str | bytes, *expected: str) -> Bad:
    return Bad(name, content, (expected,))


def _override(name: str, override: str, *expected: str) -> Bad:
    return Bad(name, TINY, (("command line: ", *expected),), (override,))


SAVER = "    ModelCheckpoint: {monitor: val/acc, mode: max}"

WRITTEN_BADLY = [
    _one("a bracket is not closed", changed("mode: max}", "mode: max"), f"{FILE}:8: ", "Invalid YAML", "expected ','"),
    _one("a tab indents", changed("  train_epochs", "\ttrain_epochs"), f"{FILE}:3: ", "tab", "Use spaces"),
    _one("a key stands twice", changed("  num_classes: 10\n", "  num_classes: 10\n  train_epochs: 3\n"),
         f"{FILE}:6: trainer.train_epochs: ", "Duplicate key `train_epochs`", f"first is at {FILE}:3"),
    _one("the file is empty", "", f"{FILE}:1: ", "expected keys and values, found nothing"),
    _one("the file is a comment", "# trainer:\n", f"{FILE}:", "expected keys and values, found nothing"),
    _one("the file is a list", "- 1\n- 2\n", f"{FILE}:1: ", "expected keys and values, found a list"),
    _one("the file is a word", "trainer\n", f"{FILE}:1: ", "expected keys and values, found a single value"),
    _one("the file has 10 MB", TINY + "# note\n" * 1_500_000, f"{FILE}: ", "larger than 100,000 bytes"),
    _one("the file is no text", b"trainer:\n  \xff\xfe\x00", f"{FILE}:2: ", "not UTF-8"),
    _one("there are two documents", TINY + "---\nseed: 1\n", f"{FILE}:22: ", "second document"),
    _one("it is nested too deeply", "a: " + "[" * 10_000, f"{FILE}:1: ", "nested more than 40 deep"),
    _one("a key has a dot", changed("train_epochs: 2", "logger.log_dir: x"), f"{FILE}:3: trainer.", "without dots"),
    _one("a value is tagged", changed("train_epochs: 2", "train_epochs: !!int 2"), f"{FILE}:3: trainer.train_epochs: ",
         "Tags", "plain data"),
    _one("a value has an anchor", changed("train_epochs: 2", "train_epochs: &n 2"), f"{FILE}:3: trainer.train_epochs: ",
         "Use a reference"),
    _one("a merge key", changed("train_epochs: 2", "<<: {seed: 1}"), f"{FILE}:3: trainer.", "Merge keys", "include"),
]  # fmt: skip

WRONG_KEYS = [
    _one("an unknown key at the root", TINY + "sede: 1\n", f"{FILE}:22: sede: ", "no key", "Did you mean `seed`?"),
    _one("an unknown key in a section", changed("train_epochs:", "train_epoch:"), f"{FILE}:3: trainer.train_epoch: ",
         "ImgClassifierTrainer has no key `train_epoch`", "Did you mean `train_epochs`?"),
    _one("an unknown key in a callback", changed("{monitor:", "{moniter:"),
         f"{FILE}:7: trainer.callbacks.ModelCheckpoint.moniter: ", "Did you mean `monitor`?"),
    _one("an unknown key in a schedule", changed("warmup_steps:", "warmup_stesp:"),
         f"{FILE}:18: optimizer.learning_rate.warmup_stesp: ", "Did you mean `warmup_steps`?"),
    _one("a key like no other", changed("train_epochs:", "xyzzy:"), f"{FILE}:3: trainer.xyzzy: ", "Its keys: acc"),
    _one("a section is missing", TINY[: TINY.index("dataset:")], f"{FILE}:1: dataset: ", "is missing", "DigitsDataset"),
    _one("a section is empty", TINY[: TINY.index("dataset:")] + "dataset:\n", f"{FILE}:19: dataset: ",
         "expected a section with a `class_name` of", "found null"),
    _one("a required key is missing", changed("  class_name: AdamW\n", "  class_name: AdamW\n  groups: {slow: {}}\n"),
         f"{FILE}:15: optimizer.groups.slow.parameter_regex: ", "is missing: expected text that is a regular"),
]  # fmt: skip

WRONG_VALUES = [
    _epochs("two", "found 'two'", name="a word for an integer"),
    _epochs("1.5", "found 1.5", name="a fraction for an integer"),
    _epochs("true", "found true", name="true for an integer"),
    _epochs("'2'", "found '2'", name="text for an integer"),
    _one("null for an integer", changed("num_classes: 10", "num_classes: 10\n  seed:"),
         f"{FILE}:6: trainer.seed: ", "expected an integer of at least 0", "found null"),
    _one("no limit", changed("train_epochs: 2", "train_epochs:"), f"{FILE}:3: trainer.train_epochs: ",
         "`max_steps`", "`max_time`"),
    _epochs("-1", "found -1", name="a negative number"),
    _epochs("[2]", "found [2]", name="a list for an integer"),
    _epochs("{n: 2}", "found {'n': 2}", name="a section for an integer"),
    _rate(".nan", "nan", name="a learning rate that is NaN"),
    _rate(".inf", "inf", name="an infinite learning rate"),
    _rate("1e999", "inf", name="a learning rate that no number can hold"),
    _rate("-1e-3", "-0.001", name="a negative learning rate"),
    _rate("1e-3x", "'1e-3x'", name="a learning rate with a letter"),
    _one("a number past its bound", changed("dropout: 0.1", "dropout: 1.0"), f"{FILE}:12: model.dropout: ",
         "expected a number of at least 0 and below 1, found 1.0"),
    _one("a word that is none of the choices", changed("mode: max}", "mode: mxa}"),
         f"{FILE}:7: trainer.callbacks.ModelCheckpoint.mode: ", "one of min, max, auto, found 'mxa'", "mean `max`?"),
    _one("a metric whose name does not say which way it is good", changed("val/acc, mode: max}", "val/score}"),
         f"{FILE}:7: trainer.callbacks.ModelCheckpoint.mode: ", "'val/score'", "`mode: min` or `mode: max`"),
    _one("no regular expression", changed("  class_name: AdamW\n", "  class_name: AdamW\n  freeze: (a\n"),
         f"{FILE}:15: optimizer.freeze: ", "expected text that is a regular expression, found '(a'"),
    _one("values that do not go together", changed(SAVER, f"{SAVER}\n    again: {{class_name: ModelCheckpoint}}"),
         f"{FILE}:6: trainer.callbacks: ", "ModelCheckpoint", "again"),
]  # fmt: skip

WRONG_CLASSES = [
    _one("a class that is not there", changed("AdamW", "AdammW"), f"{FILE}:14: optimizer.class_name: ",
         "expected one of", "found 'AdammW'", "Did you mean `AdamW`?"),
    _one("a class of another kind", changed("class_name: MLP", "class_name: AdamW"), f"{FILE}:9: model.class_name: ",
         "expected one of", "CNN", "found 'AdamW'", "--import"),
    _one("no class name where several fit", changed("  class_name: AdamW\n", ""), f"{FILE}:13: optimizer.class_name: ",
         "is missing, and several classes have these keys: "),
    _one("a callback that is no class", changed(SAVER, "    ModelChekpoint: {every_n_epochs: 1}"),
         f"{FILE}:7: trainer.callbacks.ModelChekpoint.class_name: ", "several", "Did you mean `ModelCheckpoint`?"),
]  # fmt: skip

REFERENCES_AND_INCLUDES = [
    _one("a reference to nothing", changed("${trainer.num_classes}", "${trainer.num_clases}"),
         f"{FILE}:10: model.num_classes: ", "does not exist", "Did you mean `trainer.num_classes`?"),
    _one("a reference without an end", changed("${trainer.num_classes}", "${trainer.num_classes"),
         f"{FILE}:10: model.num_classes: ", "closing `}`"),
    _one("a reference to a section", changed("${trainer.num_classes}", "${trainer}"), f"{FILE}:10: model.num_classes: ",
         "section or list"),
    _one("references in a circle", changed("num_classes: 10", "num_classes: ${model.num_classes}"),
         f"{FILE}:10: model.num_classes: ", "circular"),
    _one("an included file is missing", f"include: bat.yaml\n{TINY}", f"{FILE}:1: ", "not found: bat.yaml",
         f"Did you mean `{FILE}`?"),
    _one("a file includes itself", f"include: {FILE}\n{TINY}", f"{FILE}:1: include: ", "Circular"),
    _one("an include that is no configuration", f"include: /etc/passwd\n{TINY}", f"{FILE}:1: include: ",
         "expected the name of a .yaml file"),
]  # fmt: skip

OVERRIDES = [
    _override("an override without a value", "trainer.train_epochs", "expected `path.to.key=value`"),
    _override("an override of the wrong type", "trainer.train_epochs=no", "trainer.train_epochs: ", "found 'no'"),
    _override(
        "an override of an unknown key", "trainer.train_epoch=1", "trainer.train_epoch: ", "mean `train_epochs`?"
    ),
    _override("an override that is no YAML", "trainer.callbacks={a", "trainer.callbacks: ", "Invalid YAML"),
    _override("an override inside of a number", "trainer.train_epochs.x=1", "trainer.train_epochs.x: ", f"{FILE}:3"),
    Bad(
        "several problems at once",
        changed("train_epochs: 2", "train_epochs: 1.5").replace("AdamW", "Adamm").replace("hidden:", "hiden:"),
        (
            (f"{FILE}:3: trainer.train_epochs: ", "found 1.5"),
            (f"{FILE}:11: model.hiden: ", "Did you mean `hidden`?"),
            (f"{FILE}:14: optimizer.class_name: ", "Did you mean `Adam`?"),
            ("command line: dataset.global_batch_size: ", "found -1"),
        ),
        ("dataset.global_batch_size=-1",),
    ),
]

# found before anything is read, loaded or placed
BAD = [*WRITTEN_BADLY, *WRONG_KEYS, *WRONG_VALUES, *WRONG_CLASSES, *REFERENCES_AND_INCLUDES, *OVERRIDES]

# found when the length of the run and the model are known, and before anything is trained or written
BAD_TOGETHER = [
    _one("a warm-up longer than the run", changed("warmup_steps: 2", "warmup_steps: 20"),
         f"{FILE}:18: optimizer.learning_rate.warmup_steps: ", "20", "8"),
    _one("a schedule longer than the run", changed("warmup_steps: 2", "warmup_steps: 2\n    decay_steps: 50"),
         f"{FILE}:19: optimizer.learning_rate.decay_steps: ", "52", "8"),
    _one("a model of the other kind", changed("  num_classes: 10\n", "  num_classes: 10\n  model_mode: linen\n"),
         f"{FILE}:6: trainer.model_mode: ", "MLP", "nnx"),
    _override("more GPUs than there are", "num_gpus=64", "num_gpus: ", "is 64"),
]  # fmt: skip

# surprising, and fine
GOOD = {
    "a byte order mark": b"\xef\xbb\xbf" + TINY.encode(),
    "lines that end as on Windows": TINY.replace("\n", "\r\n").encode(),
    "numbers as YAML 1.2 has them": changed("peak_value: 1e-3", "peak_value: 1E-3").encode(),
    "no end of the last line": TINY.rstrip().encode(),
    "one document with its marks": f"---\n{TINY}...\n".encode(),
}
