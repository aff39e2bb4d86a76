"""A server answers what the model predicts, joins requests to batches, and refuses bad requests with a reason."""

import asyncio
import io
import json
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from serving_client import Answer, ask, started

from jax_trainer.exporting import export_run
from jax_trainer.models import GPTConfig
from jax_trainer.serving import ExportError, ServeConfig, load_export
from jax_trainer.serving.app import PredictApp
from jax_trainer.serving.batching import CompiledSizes
from jax_trainer.serving.text import TextModel, sampled
from jax_trainer.testing import assert_close
from jax_trainer.trainer import LanguageModelTrainer

JSON, NPY, RAW = "application/json", "application/x-npy", "application/octet-stream"
LIMITS = ServeConfig(max_batch=8, max_delay=0.05, max_queue=12, max_body=20_000, max_tokens=20, timeout=20.0)


@pytest.fixture(scope="module")
def model(exported) -> Any:
    return load_export(exported)


@pytest.fixture(scope="module")
def compiled(model) -> CompiledSizes:
    return CompiledSizes(model, LIMITS.max_batch)


@pytest.fixture
def run(model, compiled) -> Callable[..., Any]:
    """Runs a coroutine of a started app."""
    return lambda use, **limits: served(PredictApp(model, limited(**limits), compiled), use)


def limited(**limits: Any) -> ServeConfig:
    return ServeConfig(**{**vars(LIMITS), **limits})


def served(app: PredictApp, use: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    async def main() -> Any:
        asgi = app.asgi()
        async with started(asgi):
            return await use(asgi)

    return asyncio.run(main())


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("kind", [JSON, NPY, RAW])
def test_every_kind_of_body_has_the_same_answer(run, model, digits, kind):
    images = digits.test.input[:3]
    body = {JSON: json.dumps({"inputs": images.tolist()}).encode(), NPY: npy(images), RAW: images.tobytes()}[kind]

    async def use(app: Any) -> list[Answer]:
        return [
            await ask(app, "POST", "/predict", body, {"content-type": kind, "accept": accepted})
            for accepted in (JSON, NPY)
        ]

    plain, binary = run(use)
    expected = np.asarray(model(images))
    assert (plain.status, binary.status) == (200, 200)
    assert_close(np.asarray(plain.data["outputs"]["output"], np.float32), expected)
    assert_close(np.load(io.BytesIO(binary.body), allow_pickle=False), expected)


def test_concurrent_requests_share_a_batch_and_each_gets_its_own_rows(run, model, digits):
    images = digits.test.input[:7]
    requests = [images[:1], images[1:3], images[3:6], images[6:7]]

    async def use(app: Any) -> list[Answer]:
        bodies = [json.dumps({"inputs": one.tolist()}) for one in requests]
        answers = await asyncio.gather(*(ask(app, "POST", "/predict", body) for body in bodies))
        return [*answers, await ask(app, "GET", "/metrics")]

    *answers, metrics = run(use)
    rows = np.concatenate([np.asarray(one.data["outputs"]["output"], np.float32) for one in answers])
    assert_close(rows, np.asarray(model(images)))
    lines = metrics.body.decode().splitlines()
    for line in (
        'jax_trainer_requests_total{code="200"} 4',
        "jax_trainer_examples_total 7",
        "jax_trainer_padding_total 1",
        "jax_trainer_batch_examples_count 1",
        'jax_trainer_batch_examples_bucket{le="8"} 1',
        'jax_trainer_batch_examples_bucket{le="4"} 0',
    ):
        assert line in lines


ZEROS = np.zeros((2, 8, 8, 1), np.uint8)
DEEP = "[" * 100_000
REFUSED: dict[str, tuple[Any, str, int, str]] = {
    "no JSON": (b"{", JSON, 400, "JSON"),
    "nested too deeply": (DEEP[:19_000].encode(), JSON, 400, "JSON"),
    "NaN": (b'{"inputs": [NaN]}', JSON, 400, "NaN"),
    "no inputs": (b"[]", JSON, 422, "inputs"),
    "another input": (b'{"inputs": {"image": []}}', JSON, 422, "image"),
    "other axes": (json.dumps({"inputs": [1, 2]}), JSON, 422, "axes"),
    "ragged": (json.dumps({"inputs": [[[[1]], [[1], [2]]]]}), JSON, 422, "ragged"),
    "another shape": (json.dumps({"inputs": ZEROS[:, :4].tolist()}), JSON, 422, "4, 8"),
    "text": (json.dumps({"inputs": [[[["1"] * 1] * 8] * 8]}), JSON, 422, "str"),
    "numbers out of range": (json.dumps({"inputs": (ZEROS.astype(int) + 256).tolist()}), JSON, 422, "255"),
    "huge numbers": (json.dumps({"inputs": [[[[10**40]] * 8] * 8]}), JSON, 422, "255"),
    "no examples": (b'{"inputs": []}', JSON, 422, "at least one"),
    "too many examples": (np.zeros((9, 8, 8, 1), np.uint8).tobytes(), RAW, 413, "9"),
    "too large": (b"0" * 20_001, RAW, 413, "20000"),
    "half an example": (b"0" * 65, RAW, 422, "64"),
    "no npy": (b"PK", NPY, 400, "npy"),
    "objects": (b"\x93NUMPY\x01\x00\x16\x00{'descr':'|O','x':1}\n", NPY, 400, "npy"),
    "another dtype": (npy(ZEROS.astype(np.float32)), NPY, 422, "float32"),
    "cut npy": (npy(ZEROS)[:-1], NPY, 400, "127"),
    "another kind": (b"<x/>", "text/xml", 415, "xml"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_body_is_refused_with_a_reason_and_the_server_continues(run, name):
    body, kind, status, words = REFUSED[name]

    async def use(app: Any) -> tuple[Answer, Answer]:
        refused = await ask(app, "POST", "/predict", body, {"content-type": kind})
        return refused, await ask(app, "POST", "/predict", ZEROS.tobytes(), {"content-type": RAW})

    refused, after = run(use)
    assert refused.status == status and words in refused.data["error"]
    assert after.status == 200
    if status in (400, 415, 422):
        assert refused.data["expected"] == [{"name": "input", "dtype": "uint8", "shape": ["batch", 8, 8, 1]}]


def test_other_requests_are_refused(run):
    async def use(app: Any) -> list[Answer]:
        kinds = {"accept-encoding": "gzip", "content-encoding": "gzip"}
        return [
            await ask(app, "POST", "/predict", b"", kinds),
            await ask(app, "GET", "/predict"),
            await ask(app, "GET", "/v0"),
            await ask(app, "POST", "/generate", b"{}"),
        ]

    assert [answer.status for answer in run(use)] == [415, 405, 404, 404]


def test_a_full_queue_is_refused_and_a_late_answer_is_a_timeout(run):
    async def together(app: Any, rows: int = 5) -> list[Answer]:
        body, kind = np.zeros((rows, 8, 8, 1), np.uint8).tobytes(), {"content-type": RAW}
        return await asyncio.gather(*(ask(app, "POST", "/predict", body, kind) for _ in range(4)))

    answers = run(together)
    assert sorted(answer.status for answer in answers) == [200, 200, 503, 503]
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "1"}
    assert {answer.status for answer in run(partial(together, rows=1), timeout=0.01, max_delay=1.0)} == {504}


def test_health_says_that_it_is_alive_and_the_model_is_described(run):
    async def use(app: Any) -> list[Answer]:
        return [await ask(app, "GET", path) for path in ("/health", "/ready", "/model")]

    alive, ready, described = run(use)
    assert (alive.status, ready.status) == (200, 200)
    assert described.data["model"] == "MLP" and described.data["classes"][3] == "3"


# text


@pytest.fixture(scope="module")
def text_app(written) -> Callable[[], PredictApp]:
    model = load_export(written)
    compiled, text = CompiledSizes(model, 4), TextModel(model, Path(written))
    return lambda: PredictApp(model, limited(max_delay=0.001), compiled, text)


def generated(app: PredictApp, *requests: dict[str, Any]) -> list[Answer]:
    async def use(asgi: Any) -> list[Answer]:
        return await asyncio.gather(*(ask(asgi, "POST", "/generate", json.dumps(one)) for one in requests))

    return served(app, use)


def test_greedy_text_has_the_most_likely_tokens_also_beyond_the_context(text_app, bigrams):
    codes = bigrams.dataset
    table = np.asarray(bigrams.state.params["table"])[:, : len(codes.vocabulary)]
    prompts = ["the", "quick brown fox", "d"]
    answers = generated(text_app(), *({"prompt": one, "length": 12, "temperature": 0} for one in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = codes.encode(prompt).tolist()
        for _ in range(12):
            tokens.append(int(table[tokens[-1]].argmax()))
        assert answer.data == {"text": codes.decode(tokens), "tokens": 12}


def test_only_one_position_of_each_text_leaves_the_device_with_the_values_that_all_would_have(written):
    model = load_export(written)
    compiled, (spec,) = CompiledSizes(model, 4), model.inputs
    texts = np.random.default_rng(0).integers(20, size=(3, *spec.row)).astype(spec.dtype)
    requests, counts = [{spec.name: texts[:1]}, {spec.name: texts[1:]}], [1, 2]
    whole, picked = compiled.run(requests, counts), compiled.run(requests, counts, [2, 0])
    for position, one, part in zip((2, 0), whole, picked, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(part[name], array[:, position])


def test_predictions_and_texts_wait_in_one_queue(text_app, written):
    (spec,) = load_export(written).inputs
    body = json.dumps({"inputs": {spec.name: np.zeros((1, *spec.row), int).tolist()}})
    prompt = json.dumps({"prompt": "the", "length": 5, "temperature": 0})

    async def use(asgi: Any) -> list[Answer]:
        asked = [("/generate", prompt), ("/predict", body)] * 3
        return await asyncio.gather(*(ask(asgi, "POST", path, content) for path, content in asked))

    answers = served(text_app(), use)
    assert [answer.status for answer in answers] == [200] * 6
    assert answers[0].data == answers[2].data == answers[4].data == generated(text_app(), json.loads(prompt))[0].data
    assert answers[1].data == answers[3].data == answers[5].data


@pytest.mark.slow
def test_greedy_text_of_a_transformer_is_that_of_its_trainer(tmp_path, bigrams):
    config = GPTConfig(vocab_size=32, context=8, layers=1, heads=2, width=16)
    trainer = LanguageModelTrainer(model_config=config, optimizer=optax.sgd(0.1), dataset=bigrams.dataset)
    folder = export_run(trainer, tmp_path / "out", verify=False).path
    model = load_export(folder)
    app = PredictApp(model, LIMITS, CompiledSizes(model, 4), TextModel(model, folder))
    answers = generated(app, *({"prompt": one, "length": 5, "temperature": 0} for one in ("the", "d")))
    for prompt, answer in zip(("the", "d"), answers, strict=True):
        assert answer.data["text"] == trainer.generate(prompt, 5, temperature=0.0)


def test_a_seed_draws_the_same_text(text_app):
    options = {"prompt": "the", "length": 12, "temperature": 2.0, "top_k": 5}
    one, same, other = generated(text_app(), *({**options, "seed": seed} for seed in (1, 1, 2)))
    assert one.data == same.data != other.data


def test_a_stop_ends_the_text(text_app):
    (full,) = generated(text_app(), {"prompt": "the", "length": 8, "temperature": 0})
    stop = full.data["text"][5]
    (cut,) = generated(text_app(), {"prompt": "the", "length": 8, "temperature": 0, "stop": stop})
    assert cut.data["text"] == full.data["text"][: full.data["text"].index(stop, 3)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "Ω"}, "Ω"),
        ({"prompt": "a", "length": 21}, "20"),
        ({"prompt": "a", "length": True}, "length"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_k": 0}, "top_k"),
        ({"prompt": "a", "top_p": 0.5}, "top_p"),
        ({"prompt": "a", "stop": "ab"}, "stop"),
    ],
)
def test_a_bad_prompt_is_refused_with_a_reason(text_app, request_, words):
    (answer,) = generated(text_app(), request_)
    assert answer.status == 422 and words in answer.data["error"]


@pytest.mark.parametrize(
    ("file", "content"), [("../secret.json", "{}"), ("vocabulary.json", "[]"), ("tokenizer.json", "{}"), (None, "")]
)
def test_only_a_vocabulary_of_the_export_is_read(written, tmp_path, file, content):
    (tmp_path / "secret.json").write_text('{"level": "char", "symbols": ["a"]}')
    (folder := tmp_path / "export").mkdir()
    if content:
        (folder / file).write_text(content)
    model = load_export(written)
    model.manifest["text"] = {"file": file}
    with pytest.raises(ExportError, match=str(file)):
        TextModel(model, folder)


def test_tokens_are_drawn_by_their_probability():
    rng, logits = np.random.default_rng(0), np.log([0.5, 0.3, 0.2])
    counts = np.bincount([sampled(logits, rng, 1.0, None) for _ in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=0.03)
    assert {sampled(logits, rng, 1.0, 2) for _ in range(100)} == {0, 1}
