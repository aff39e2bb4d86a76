import math

import pytest

from jax_trainer.metrics import BLEU, ROUGE, evaluate_text

TEXTS = ["the cat sat on the mat", "a dog barked at the moon", "it rained"]
REFERENCES = ["the cat sat on a mat", "the dog barked at the moon", "it rained all day"]


def test_bleu_is_that_of_the_corpus_however_it_is_split():
    import sacrebleu

    expected = sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score
    first, rest = BLEU().update(TEXTS[:1], REFERENCES[:1]), BLEU().update(TEXTS[1:], REFERENCES[1:])
    assert first.merge(rest).compute() == expected
    assert 0 < expected < 100


def test_a_text_may_have_several_references_and_others_fewer():
    several = [[REFERENCES[0], TEXTS[0]], REFERENCES[1], REFERENCES[2]]
    assert BLEU().update(TEXTS, several).compute() > BLEU().update(TEXTS, REFERENCES).compute()
    assert ROUGE().update(TEXTS[:1], several[:1]).compute()["rougeL"] == 1.0


def test_rouge_is_the_mean_of_all_texts_however_they_are_split():
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rouge1", "rougeL"])
    each = [scorer.score(reference, text) for text, reference in zip(TEXTS, REFERENCES, strict=True)]
    metric = ROUGE(["rouge1", "rougeL"]).update(TEXTS[:2], REFERENCES[:2])
    found = metric.merge(ROUGE(["rouge1", "rougeL"]).update(TEXTS[2:], REFERENCES[2:])).compute()
    assert found == {kind: pytest.approx(sum(one[kind].fmeasure for one in each) / 3) for kind in ("rouge1", "rougeL")}


def test_generated_texts_are_evaluated_by_name():
    answers = dict(zip("abc", TEXTS, strict=True))
    found = evaluate_text(answers.__getitem__, "abc", TEXTS, {"bleu": BLEU(), "text": ROUGE(["rouge1"])})  # type: ignore[arg-type]
    assert found == {"bleu": pytest.approx(100), "text_rouge1": 1.0}


def test_texts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 predictions have 2"):
        BLEU().update(TEXTS, REFERENCES[:2])
    with pytest.raises(TypeError, match="`predictions`"):
        BLEU().update("a text", "another")
    with pytest.raises(ValueError, match="no reference"):
        ROUGE().update(["a"], [[]])
    assert math.isnan(BLEU().compute())
    assert math.isnan(ROUGE().compute()["rouge1"])
