"""Which checkpoint is the best and which the latest: the rules that every part of the library uses.

NaN is never best, ties go to the later step, and "latest" is by step, not by time. `mode: auto` infers from the name
of a metric whether lower or higher is better.
"""

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, Protocol, TypeVar

from jax_trainer.config.settings import SettingsError

_log = logging.getLogger("jax_trainer")
Direction = Literal["min", "max"]
Mode = Literal["min", "max", "auto"]


class Ranked(Protocol):
    """What the rules see of a checkpoint."""

    @property
    def step(self) -> int:
        """Its step."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Its metrics."""
        ...

    @property
    def without(self) -> Sequence[str]:
        """The fields of the state that it omits."""
        ...


One = TypeVar("One", bound=Ranked)


def is_better(new: float, old: float | None, mode: Direction) -> bool:
    """Whether the value `new` of a metric is better than `old`; None or NaN: than nothing.

    >>> is_better(0.5, 0.7, "min"), is_better(0.7, 0.7, "max"), is_better(0.9, None, "min")
    (True, False, True)
    """
    if math.isnan(new) or old is None or math.isnan(old):
        return not math.isnan(new)
    return new < old if mode == "min" else new > old


def is_best(new: float, best: float | None, mode: Direction) -> bool:
    """Whether the later value `new` of a metric is the best one: better than the best so far, or equal to it."""
    return new == best or is_better(new, best, mode)


def best_first(found: Iterable[One], monitor: str | None, mode: Direction) -> list[One]:
    """The checkpoints with a value of the metric, best first; of equal ones, the later."""
    sign = -1 if mode == "max" else 1
    costs = [(sign * one.metrics.get(monitor or "", math.nan), -one.step, one) for one in found]
    return [one for _, _, one in sorted((row for row in costs if not math.isnan(row[0])), key=lambda row: row[:2])]


def newest_first(found: Iterable[One], fields: Collection[str] = ()) -> list[One]:
    """The checkpoints that have all of these fields of the state, newest first."""
    having = (one for one in found if not any(name in fields for name in one.without))
    return sorted(having, key=lambda one: one.step, reverse=True)


# "min" or "max", from the name of a metric

_HIGHER_IS_BETTER = """
    acc accuracy accuracies correct hit hits hitrate match matches success win wins top precision recall sensitivity
    specificity tpr tnr ppv npv f1 f2 fbeta auc auroc auprc aupr aucpr rocauc prauc roc ap map mar mrr ndcg dcg
    r2 rsquared correlation corr pearson spearman kendall concordance cindex kappa mcc matthews iou miou giou diou
    jaccard dice similarity psnr snr sdr sisnr sisdr ssim msssim pesq stoi bleu sacrebleu rouge rougel rougelsum meteor
    chrf cider bertscore elbo likelihood loglikelihood logprob logp ll reward rewards return returns silhouette
    throughput improvement reduction explained reciprocal inception purity nmi ari pck
"""
_LOWER_IS_BETTER = """
    loss losses error errors err cost costs penalty regret residual residuals mistakes misclassified mse rmse nmse nrmse
    mae mape smape msle rmsle l1 l2 huber hinge logloss nll ce bce xent crossentropy kl kld divergence deviance
    discrepancy distance dist wasserstein emd mmd chamfer hausdorff perplexity ppl bpc bpb bpd bits wer cer eer fid kid
    lpips ece brier crps epe ade fde fpr fnr false std time latency seconds duration nelbo drop gap degradation
    levenshtein ter distortion mcd rmsd
"""
_DIRECTIONS: dict[str, Direction] = {
    **dict.fromkeys(_HIGHER_IS_BETTER.split(), "max"),
    **dict.fromkeys(_LOWER_IS_BETTER.split(), "min"),
}
_NEGATED = frozenset(("neg", "negative"))
_UNCLEAR = frozenset(("minus", "inv", "inverse", "not", "non"))  # "minus_acc" and "acc_minus_chance" differ
_QUALIFYING = frozenset(("at", "per"))  # the rest only qualifies the metric
_CHUNK = re.compile(r"[A-Za-z0-9]+|@")
_PIECE = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def best_mode(mode: Mode, monitor: str, *, key: str = "mode") -> Direction:
    """`mode`, with "auto" inferred from the metric's name; an ambiguous name is an error.

    `key` is the user's name for `mode`.

    >>> best_mode("auto", "val/acc"), best_mode("auto", "val/top1_error"), best_mode("auto", "val/loss/ce")
    ('max', 'min', 'min')
    >>> best_mode("auto", "val/score")
    Traceback (most recent call last):
    jax_trainer.config.settings.SettingsError: `mode: auto` cannot infer whether a lower or a higher 'val/score' is \
better. Check the name, or set `mode: min` or `mode: max`.
    """
    last = "loss" if "/loss/" in monitor else monitor.rpartition("/")[2]  # each of several losses is one
    inferred = _direction(last)
    found = inferred if mode == "auto" else mode
    if mode != "auto" and inferred not in (None, mode):
        _warn_of_mode(key, mode, monitor)
    if found is None:
        text = f"`{key}: auto` cannot infer whether a lower or a higher {monitor!r} is better."
        raise SettingsError([(key, f"{text} Check the name, or set `{key}: min` or `{key}: max`.")])
    return found


@cache
def _warn_of_mode(key: str, mode: Direction, monitor: str) -> None:
    kept = "lowest" if mode == "min" else "highest"
    text = "`%s: %s` takes the %s %s for the best, which by its name is the worst. `%s: auto` knows better."
    _log.warning(text, key, mode, kept, monitor, key)


def describe_mode(mode: Direction) -> str:
    """Readable text for a mode."""
    return "higher is better" if mode == "max" else "lower is better"


def _direction(name: str) -> Direction | None:
    """The direction of a name's words. If they disagree, "min" if the last one does (the loss of an accuracy)."""
    if name == "val_metric":  # of `is_new_model_better`
        return "min"
    of_name = _DIRECTIONS.get("".join(_CHUNK.findall(name)).lower())
    words = list(_words(name))
    found: list[Direction] = [of_name] if of_name else [one for one in map(_of_word, words) if one]
    disagree = "max" in found and "min" in found and found[-1] == "max"
    if not found or disagree or not _UNCLEAR.isdisjoint(words):
        return None
    if name.startswith("1-") or ("false" not in words and not _NEGATED.isdisjoint(words)):
        return "min" if found[-1] == "max" else "max"
    return found[-1]


def _words(name: str) -> Iterator[str]:
    """The words of a name, up to "at" or "per"; camelCase is split unless the word is known as it is."""
    for chunk in _CHUNK.findall(name):
        if chunk == "@" or chunk.lower() in _QUALIFYING:
            return
        pieces = [chunk] if _of_word(chunk.lower()) else _PIECE.findall(chunk)
        yield from (piece.lower() for piece in pieces)


def _of_word(word: str) -> Direction | None:
    """The direction of a word, if necessary without its trailing digits."""
    for known in (word, word.rstrip("0123456789")):
        if known in _DIRECTIONS:
            return _DIRECTIONS[known]
        if known.endswith(("loss", "error")):
            return "min"
        if known.endswith("accuracy"):
            return "min" if known.endswith(("inaccuracy", "unaccuracy")) else "max"
    return None
