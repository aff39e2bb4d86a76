"""Suggestions for unknown names: similar spelling, or the name that Lightning or Keras uses for the same thing."""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

_LONGEST_WORD = 100
_ACCUMULATING = ("accumulate_grad_batches", "gradient_accumulation_steps", "accumulation_steps")
_NORMS = ("gradient_clip_val", "clipnorm", "global_clipnorm", "max_grad_norm")
_SYNONYMS = (  # names of the same thing in several libraries, ours among them
    ("train_epochs", "num_epochs", "max_epochs", "epochs", "n_epochs", "nb_epoch", "num_train_epochs"),
    ("max_steps", "n_steps", "num_steps", "num_train_steps", "total_steps", "num_iterations"),
    ("max_steps_per_epoch", "steps_per_epoch", "limit_train_batches"),
    ("limit_val_batches", "n_eval_batches", "validation_steps", "eval_batches", "max_eval_batches"),
    ("check_val_every_n_epoch", "eval_freq", "validation_freq", "val_every_n_epochs", "eval_every_n_epochs"),
    ("val_every_n_steps", "eval_every_n_steps", "val_check_interval", "eval_steps", "eval_interval"),
    ("accumulate", *_ACCUMULATING),
    ("clip_norm", *_NORMS),
    ("enable_progress_bar", "progress", "verbose", "progress_bar", "stdout"),
    ("loss_fn", "loss", "criterion", "loss_function"),
    ("train_loader", "train_ds", "train_itr", "train_dataloaders", "train_dataloader", "train_data", "x"),
    ("val_loader", "test_ds", "val_itr", "val_dataloaders", "val_dataloader", "validation_data", "val_ds", "val_data"),
    ("test_loader", "test_ds", "test_dataloaders", "test_dataloader", "test_data"),
    ("log_steps_every", "log_every_n_steps"),
    ("resume", "ckpt_path", "resume_from_checkpoint"),
    ("log_dir", "default_root_dir", "logdir", "output_dir", "save_dir"),
    ("detect_nans", "detect_anomaly", "terminate_on_nan"),
    ("batch_size", "global_batch_size"),
    ("learning_rate", "lr", "step_size"),
    ("seed", "random_seed", "seed_everything", "random_state"),
    ("rnkey", "rng_key", "rng", "key"),
    ("optimizer", "tx", "opt", "optimizer_config"),
    ("ema", "ema_decay", "use_ema"),
    ("precision", "dtype", "mixed_precision"),
    ("mesh", "strategy", "accelerator", "num_devices", "devices", "gpus"),
    ("exmp_input", "input_sample", "example_input", "example_batch", "input_shape"),
    ("save_top_k", "max_to_keep", "save_total_limit", "save_best_only"),
    ("hooks", "callbacks"),
    ("class_name", "class_path", "_target_"),
    ("dataset", "data", "datamodule", "dataset_config"),
    ("val/loss", "val_loss", "eval_loss"),
    ("val/acc", "val/accuracy", "val_acc", "val_accuracy"),
    ("f32", "32", "32-true", "float32"),
    ("f16", "16", "16-mixed", "float16", "fp16"),
    ("bf16", "bf16-mixed", "bfloat16"),
    ("rank", "r", "lora_rank"),  # of `LoRA`, by their names in PEFT
    ("alpha", "lora_alpha"),
    ("dropout", "lora_dropout"),
    ("match", "target_modules"),
    ("train", "modules_to_save"),
    ("CSVToolLogger", "CSVLogger"),
    ("MLflowToolLogger", "MLFlowLogger", "MLflowLogger"),
    ("TensorboardToolLogger", "TensorBoardLogger", "TensorBoard"),
    ("WandBToolLogger", "WandbLogger", "WandbMetricsLogger"),
)
_ELSEWHERE = {  # options of another object here
    **dict.fromkeys(
        ("gradient_clip_algorithm", "clipvalue"),
        "By the global norm, set `clip_norm`; by value, use the transform `GradClipValue` of the optimizer.",
    ),
    **dict.fromkeys(("dirpath", "filepath", "filename"), "Checkpoints are in `checkpoints/` of the run's folder."),
    **dict.fromkeys(("patience", "min_delta", "early_stopping"), "It is an option of the callback `EarlyStopping`."),
    **dict.fromkeys(("save_top_k", "monitor"), "It is an option of the callback `ModelCheckpoint`."),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay"), "It is an option of the optimizer."),
    **dict.fromkeys(("batch_size", "num_workers", "shuffle"), "It is an option of the dataset or the loader."),
    "validation_split": (
        "Split the arrays, and pass the second part as `test_ds` of `fit`, or as `val_loader` of `train_model`."
    ),
    "num_sanity_val_steps": (
        "No sanity check is needed: shapes are checked before the first step, and `jax-trainer check` traces a step."
    ),
    "profiler": "Add the callback `JAXProfiler`, or wrap the call in `with jax.profiler.trace(folder):`.",
    "class_weight": (
        "`fit` has it, and `ImgClassifierTrainer` has `class_weights`. Elsewhere, weight the loss by class in your "
        "loss function."
    ),
    "sample_weight": (
        "`fit` has it. Elsewhere, put the weights into the batches, as the `mask` of a `SupervisedBatch`, and return "
        "one loss per example from your loss function."
    ),
    "initial_epoch": "Resume from a checkpoint (`resume=`), which stores the epoch and the step.",
    "enable_checkpointing": "The callback `ModelCheckpoint` saves checkpoints; leave it out to save none.",
    "restore_best_weights": "`ModelCheckpoint` keeps the best weights, which are tested after training.",
    **dict.fromkeys(
        ("deterministic", "benchmark"),
        "Leave it out: the same seed gives the same bits on a CPU; on a GPU, most operations need "
        "`XLA_FLAGS=--xla_gpu_deterministic_ops=true`.",
    ),
}
_OF_VALUES = {  # values that Lightning takes under the same key
    ("fast_dev_run", bool): "Give the number of steps: `fast_dev_run=1` instead of true, 0 instead of false.",
    **{
        (key, float): "Give the number of batches, not a fraction of them; null: all."
        for key in ("limit_val_batches", "limit_test_batches")
    },
    ("max_time", str): 'Give seconds: "00:00:10" is 10, "00:12:00:00" is 43200.',
    ("max_time", dict): "Give seconds: {hours: 12} is 43200.",
}
Checked = TypeVar("Checked", bound=Callable[..., Any])


def elsewhere(word: str) -> str:
    """A sentence that says where an option belongs; "" if unknown."""
    return f" {_ELSEWHERE[word]}" if word in _ELSEWHERE else ""


def beside(word: str, value: Any = None) -> str:
    """A sentence on what else changes with our option for the one of another library; "" if nothing does."""
    number = value if isinstance(value, int) else "the same number"
    return f" It splits each batch: multiply the batch size by {number}." if word in _ACCUMULATING else ""


def value_hint(key: str, value: Any) -> str:
    """A sentence on how to write a value that Lightning accepts for `key`; "" for all others.

    >>> value_hint("fast_dev_run", True)
    ' Give the number of steps: `fast_dev_run=1` instead of true, 0 instead of false.'
    """
    return f" {_OF_VALUES[key, type(value)]}" if (key, type(value)) in _OF_VALUES else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """A sentence that suggests the closest known name, if one is close enough; otherwise "".

    >>> suggestion("learning_rat", ["b1", "learning_rate"]), suggestion("max_epochs", ["num_epochs"])
    (' Did you mean `learning_rate`?', ' Did you mean `num_epochs`?')
    """
    near = nearest(word, known)
    return f" Did you mean `{near}`?" if near else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known synonym of `word`, or the known name with the most similar spelling; "" if none is close."""
    known = list(known)
    return _synonym(word, known) or _similar(word, known)


def _synonym(word: str, known: Collection[str]) -> str:
    synonyms = [other for words in _SYNONYMS if word in words for other in words if other != word and other in known]
    return next(iter(synonyms), "")


def _similar(word: str, known: Iterable[str]) -> str:
    """The known name with the most similar spelling, whatever its case and separators; "" if none is close."""
    plain = {_plain(other): other for other in known if other != word}
    cutoff = 0.65 if len(_plain(word)) < 4 else 0.75  # one letter of three
    near = difflib.get_close_matches(_plain(word)[:_LONGEST_WORD], plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else ""


def _plain(word: str) -> str:
    return word.lower().replace("_", "").replace("-", "")


def check_keywords(owner: str, keywords: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises a `TypeError` with a suggestion for every keyword that `owner` does not have."""
    hints = {name: _hint(name, known, value) for name, value in keywords.items() if name not in known}
    if hints:
        available = "" if all(hints.values()) else f" Its keywords: {', '.join(sorted(set(known))) or 'none'}."
        raise TypeError(" ".join(f"{owner} has no keyword `{name}`.{text}" for name, text in hints.items()) + available)


def _hint(name: str, known: Collection[str], value: Any) -> str:
    # where the option belongs comes before a name with a similar spelling
    near = (not _synonym(name, known) and elsewhere(name)) or suggestion(name, known)
    return near + beside(name, value)


@functools.cache
def keywords_of(target: Callable[..., Any]) -> list[str] | None:
    """The parameter names of a function or a class's constructor; None if it has `**kwargs`."""
    parameters = inspect.signature(target).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return [one.name for one in parameters if one.name != "self"]


def checks_keywords(target: Checked, also: Collection[str] = ()) -> Checked:
    """Decorates a function or a class: unknown keywords raise a `TypeError` with a suggestion.

    `also`: the names that its `**kwargs` takes.

    >>> @checks_keywords
    ... def train(num_epochs=1): ...
    >>> train(epochs=3)
    Traceback (most recent call last):
    TypeError: train has no keyword `epochs`. Did you mean `num_epochs`?
    """
    if isinstance(target, type):
        target.__init__ = checks_keywords(target.__init__, also)  # type: ignore[misc]  # of this very class
        return target  # pyright: ignore[reportReturnType]  # the class itself
    owner = target.__qualname__.removesuffix(".__init__")
    parameters = inspect.signature(target).parameters.values()
    known = [*(one.name for one in parameters if one.kind is not one.VAR_KEYWORD), *also]
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    keyword_only = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]

    @functools.wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if keyword_only and len(args) > len(positional):
            raise TypeError(_too_many_positional(owner, args, positional, keyword_only))
        check_keywords(owner, kwargs, known)
        return target(*args, **kwargs)

    return checked  # type: ignore[return-value]  # same signature


def _too_many_positional(
    owner: str, args: Sequence[Any], positional: Sequence[str], keyword_only: Sequence[str]
) -> str:
    own = positional[0] == "self" if positional else False
    names, count = [f"`{name}`" for name in positional[own:]], len(args) - own
    takes = f"at most {len(names)} positional arguments ({', '.join(names)})" if names else "no positional arguments"
    others = ", ".join(f"`{name}=`" for name in keyword_only)
    return f"{owner} takes {takes}, got {count}. Pass these by keyword: {others}."
