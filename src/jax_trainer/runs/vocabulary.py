"""How a style reads its options: its own words for some of them, and those that it cannot honour, with the reason."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.runs.options import Options
from jax_trainer.runs.train_options import TrainOptions as TrainOptions

LEAVES = tuple(one.name for one in fields(Options))
Style = TypeVar("Style", bound=Callable[..., Any])
# the words of a style for an option
WORDS: dict[str, dict[str, str]] = {
    "fit": {
        "num_epochs": "train_epochs",
        "eval_freq": "check_val_every_n_epoch",
        "steps_per_epoch": "max_steps_per_epoch",
        "progress": "enable_progress_bar",
    },
    "train_fn": {
        "n_steps": "max_steps",
        "eval_every_n_steps": "val_every_n_steps",
        "n_eval_batches": "limit_val_batches",
        "progress": "enable_progress_bar",
    },
    "TrainLoop": {"n_steps": "max_steps", "stdout": "enable_progress_bar"},
}
# what a style has instead of the default of an option
DEFAULTS: dict[str, dict[str, Any]] = {"fit": {"seed": 0}, "lr_find": {"seed": 0}}
_NO_FOLDER = "it has no run folder: `fit` and `TrainerModule` have one"
_NO_RUN = {
    **dict.fromkeys(("train_epochs", "check_val_every_n_epoch"), "it counts steps: `n_steps`"),
    "max_rollbacks": _NO_FOLDER,
    "on_nonfinite=rollback": _NO_FOLDER,
    **dict.fromkeys(("log_dir", "log_steps_every", "mirror", "progress_metric"), _NO_FOLDER),
}
_NO_TESTS = {"limit_test_batches": "it has no test set: evaluate the result on it"}
# the options that a style cannot honour, or not with this value, and why
REFUSED: dict[str, dict[str, str]] = {
    "fit": _NO_TESTS,
    "train_fn": {
        **_NO_RUN,
        **_NO_TESTS,
        "losses": "`train_step` computes its own gradients: weight the losses in it, and return the parts as metrics",
        "lora": (
            "`train_step` computes the gradients of all parameters, and its nnx.Optimizer has a state for each of "
            "them: use `fit`, `TrainerModule` or `TrainLoop`, or layers with adapters (`nnx.LoRALinear`) and "
            "`nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)`"
        ),
        "log_intermediates": "`train_step` calls the model itself: return what it sows as metrics",
        "seed": "the key is the first argument of the function that it returns",
        "seed_eval": "the keys of evaluations follow from the first argument of the function that it returns",
    },
    "TrainLoop": {
        **_NO_RUN,
        **_NO_TESTS,
        "seed": "the key is `rnkey`",
        "seed_eval": "the key of an evaluation is `EvalLoop(rnkey=…)`",
        "detect_nans": 'a loop skips or raises: `on_nonfinite="skip"` or "raise"',
        "steps_per_call": "a call of the loop trains up to the next checkpoint: `n_steps_per_checkpoint`",
        "resident": "it reads batches one by one: a loader may keep its arrays on the device",
        "debug": "a checkpoint needs what a compiled step returns: debug the loss with `TrainerModule`",
        "log_intermediates": "only the model and the optimizer state are in its checkpoints",
        **dict.fromkeys(("val_every_n_steps", "limit_val_batches"), "evaluate its checkpoints with `EvalLoop`"),
        **dict.fromkeys(
            ("max_time", "max_steps_per_epoch", "overfit_batches", "fast_dev_run", "on_nonfinite=stop"),
            "the loop is yours: decide it between two checkpoints",
        ),
    },
}


def takes_options(target: Style) -> Style:
    """Decorates a style: unknown keywords raise a `TypeError` that suggests one of its own, or an option."""
    words = WORDS.get(target.__name__, {})
    return checks_keywords(target, [name for name in LEAVES if name not in words.values()])


def options_of(style: str, given: Mapping[str, Any], **own: Any) -> Options:
    """The options of a call of a style; raises for those that it cannot honour.

    Args:
        style: its name, as in `REFUSED`.
        given: the keywords that are no parameters of it.
        own: values of its parameters, by the word of the style or of the option.
    """
    refused, words = REFUSED.get(style, {}), WORDS.get(style, {})
    for name, value in given.items():
        at = name if name in refused else f"{name}={value}" if isinstance(value, str) else ""
        if at in refused:
            raise TypeError(f"`{style}` cannot have the option `{at}`: {refused[at]}.")
    translated = {words.get(name, name): value for name, value in own.items()}
    for word, name in words.items():
        if name in given and name in translated:
            raise TypeError(f"`{style}` calls the option `{name}` `{word}`. Pass that one.")
    return Options(**{**DEFAULTS.get(style, {}), **translated, **given})
