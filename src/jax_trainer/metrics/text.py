"""Metrics of generated text, on the host: BLEU and ROUGE, by sacrebleu and rouge-score (extra `text-metrics`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from jax_trainer.diagnostics.optional_import import from_extra


class TextMetric(ABC):
    """A metric of texts: `update` it with predictions and references, `merge` others, and `compute` it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, Sequence[str]]] = []

    def update(self, predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> Self:
        """Adds predictions, each with its reference, or with several."""
        if isinstance(predictions, str) or isinstance(references, str):
            raise TypeError("`predictions` and `references` must be lists of texts, got a single text.")
        if len(predictions) != len(references):
            raise ValueError(f"{len(predictions)} predictions have {len(references)} references. Pass one for each.")
        several = [[one] if isinstance(one, str) else list(one) for one in references]
        if not all(several):
            raise ValueError("A prediction has no reference. Pass at least one for each.")
        self._pairs += zip(predictions, several, strict=True)
        return self

    def merge(self, other: Self) -> Self:
        """Adds the texts of another metric of this kind."""
        self._pairs += other._pairs
        return self

    @abstractmethod
    def compute(self) -> Any:
        """The result of all texts so far."""


class BLEU(TextMetric):
    """The BLEU score of a corpus, from 0 to 100.

    Args:
        options: of `sacrebleu.metrics.BLEU`, such as `tokenize="intl"` or `lowercase=True`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        with from_extra("text-metrics"):
            from sacrebleu.metrics.bleu import BLEU as Bleu
        self._bleu = Bleu(**options)

    def compute(self) -> float:
        """The score; of no text, NaN."""
        if not self._pairs:
            return float("nan")
        most = max(len(references) for _, references in self._pairs)
        # one stream per reference; None where a prediction has fewer
        streams = [[one[number] if number < len(one) else None for _, one in self._pairs] for number in range(most)]
        return self._bleu.corpus_score([prediction for prediction, _ in self._pairs], streams).score  # pyright: ignore[reportArgumentType]


RougeKind = Literal["rouge1", "rouge2", "rougeL", "rougeLsum"]


class ROUGE(TextMetric):
    """The mean ROUGE F-measures of all predictions, from 0 to 1, by kind; of several references, the best one counts.

    Args:
        kinds: the scores to compute.
        use_stemmer: compare words without their suffixes.
    """

    def __init__(
        self, kinds: Sequence[RougeKind] = ("rouge1", "rouge2", "rougeL"), *, use_stemmer: bool = False
    ) -> None:
        super().__init__()
        with from_extra("text-metrics"):
            from rouge_score.rouge_scorer import RougeScorer
        self._kinds, self._scorer = tuple(kinds), RougeScorer(list(kinds), use_stemmer=use_stemmer)

    def compute(self) -> dict[str, float]:
        """The scores by kind; of no text, NaN."""
        scores = [self._scorer.score_multi(references, prediction) for prediction, references in self._pairs]
        return {
            kind: sum(one[kind].fmeasure for one in scores) / len(scores) if scores else float("nan")
            for kind in self._kinds
        }


def evaluate_text(
    generate: Callable[[str], str],
    prompts: Sequence[str],
    references: Sequence[str | Sequence[str]],
    metrics: Mapping[str, TextMetric],
) -> dict[str, float]:
    """The metrics of the texts that `generate` returns for `prompts`, by name; several results as `<name>_<key>`.

    Args:
        generate: returns the text for a prompt.
        prompts: one per text.
        references: what each text should be.
        metrics: new metrics, by name.
    """
    texts = [generate(prompt) for prompt in prompts]
    found = {name: metric.update(texts, references).compute() for name, metric in metrics.items()}
    flat = {name: one if isinstance(one, Mapping) else {"": one} for name, one in found.items()}
    return {f"{name}_{key}".rstrip("_"): value for name, one in flat.items() for key, value in one.items()}
