"""Every kind of data resumes from every position with the remaining batches."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader, Data, DataError, DataSource, Position
from jax_trainer.datasets.contents import content_of
from jax_trainer.engine import EpochEnd, Notice, Plan, StepEnd, StepMetrics, run, train_events
from tests.datasets.data_sources import IDS, KINDS, NEEDS_TORCH, REPLAYING, SIZE, STATEFUL, ids_of, shuffled

EPOCHS = 3


def code_loss(params, batch, *, rng, train):
    # one number that encodes the ids of a batch and their order
    ids = ids_of(batch)
    return params * 0.0, {"code": (ids * 31 ** jnp.arange(len(ids))).sum()}


@pytest.fixture(scope="module")
def program():
    program = function_program(lambda key, batch: jnp.zeros(()), code_loss, optax.sgd(0.0))
    return compile_program(program, on_recompile="ignore", donate=False)


@pytest.fixture(scope="module")
def state(program):
    return program.init(jax.random.key(0), IDS[:SIZE])


def ledger(program, state, source, *, steps_per_call=1, prefetch=None, at=Position(), done=0):
    """The batches that a run saw, by step, and the position after each of its events."""
    state = state.replace(step=jnp.int32(done))
    plan = Plan(max_epochs=EPOCHS, steps_per_epoch=6, steps_per_call=steps_per_call)
    codes, positions = {}, {}
    for event in train_events(program, state, Data(source, prefetch=prefetch), plan, at):
        if isinstance(event, StepEnd | EpochEnd):
            positions[event.step] = event.position  # the end of an epoch replaces that of its last step
        if isinstance(event, StepMetrics):
            rows = event.rows
            codes |= dict(zip(range(rows.first, rows.last + 1), rows.columns["code"].values.tolist(), strict=True))
    return codes, positions


def test_a_run_resumes_from_every_position_with_the_remaining_batches(program, state, subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            full, positions = ledger(program, state, KINDS[kind]())
            assert len(full) == 6 * EPOCHS
            for step in (1, 4, 5, 6, 7, 12, 14):
                rest, _ = ledger(program, state, KINDS[kind](), at=positions[step], done=step)
                assert rest == {later: code for later, code in full.items() if later > step}, f"after step {step}"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if "grain" in kind and "loader" in kind else kind for kind in KINDS],
)
def test_chunks_and_threads_see_the_same_batches_and_positions(program, state, kind):
    full, positions = ledger(program, state, KINDS[kind](), prefetch=0)
    for chunk, prefetch in [(1, 3), (4, 0), (4, 5)]:
        seen, where = ledger(program, state, KINDS[kind](), steps_per_call=chunk, prefetch=prefetch)
        assert seen == full
        for step, position in list(where.items())[::4]:
            rest, _ = ledger(
                program, state, KINDS[kind](), at=position, done=step, steps_per_call=chunk, prefetch=prefetch
            )
            assert rest == {later: code for later, code in full.items() if later > step}, f"after step {step}"
        assert {step: (p.epoch, p.epoch_step) for step, p in where.items()}.items() <= {
            step: (p.epoch, p.epoch_step) for step, p in positions.items()
        }.items()


def test_data_that_must_replay_has_a_notice_at_the_start(program, state, subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            events = train_events(program, state, KINDS[kind](), Plan(max_steps=2, steps_per_epoch=6))
            texts = [event.text for event in events if isinstance(event, Notice)]
            assert bool(texts) == (kind in REPLAYING)
            assert all("'train' data" in text and "keeps no position" in text for text in texts)


def test_a_notice_without_an_observer_that_shows_it_is_logged_once(program, state, caplog):
    run(program, state, lambda: shuffled(1), Plan(max_epochs=3))
    assert len([record for record in caplog.records if "keeps no position" in record.message]) == 1


def test_the_state_that_is_saved_is_that_after_the_last_batch_that_was_used(program, state, subtests):
    for kind in sorted(STATEFUL):
        with subtests.test(kind=kind):
            ahead, _ = ledger(program, state, KINDS[kind](), prefetch=5)
            plain, positions = ledger(program, state, KINDS[kind](), prefetch=0)
            rest, _ = ledger(program, state, KINDS[kind](), at=positions[2], done=2, prefetch=5)
            assert ahead == plain
            assert rest[3] == plain[3]


def test_torch_shuffles_anew_in_every_epoch_and_alike_in_every_process(program, state):
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    torch.manual_seed(7)
    full, _ = ledger(program, state, KINDS["torch"]())
    torch.rand(100)  # whatever else draws numbers does not matter
    again, _ = ledger(program, state, KINDS["torch"]())
    torch.manual_seed(8)
    other, _ = ledger(program, state, KINDS["torch"]())
    assert full == again != other
    assert len(set(full.values())) == len(full)


def test_set_epoch_is_called_where_there_is_one():
    epochs = []

    class Sampler:
        def set_epoch(self, epoch):
            epochs.append(epoch)

        def __iter__(self):
            return iter([IDS[:SIZE]])

    data_source = DataSource(Sampler(), "train")
    for epoch in (1, 2):
        list(data_source.open(epoch))
    assert epochs == [1, 2]


def test_a_state_for_data_that_keeps_none_is_an_error(program, state, subtests):
    for kind in ["array loader", "list", "stream"]:
        with subtests.test(kind=kind), pytest.raises(DataError, match="not the data that the run was started with"):
            ledger(program, state, KINDS[kind](), at=Position(1, 2, {"at": 2}))


class Foreign:
    """A loader of another library: iterable, whatever else it has."""

    def __iter__(self):
        return iter(ArrayLoader(IDS, SIZE))


class ForeignEpoch(Foreign):
    """A loader with our method, whose iterators are those of another library."""

    class Iterator:
        def __init__(self, batches):
            self._batches = iter(batches)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._batches)

        def take(self, count):
            raise AssertionError

    def epoch(self, number, start=0):
        return self.Iterator([*self][start:])


OTHER_MEANINGS = {
    "numbers": dict.fromkeys(["epoch", "state", "sizes", "order", "batch", "schedule", "arrays", "prepare"], 3),
    "texts": dict.fromkeys(["epoch", "arrays", "order", "dataset", "in_memory", "transforms", "is_replicated"], "text"),
    "lists": {"arrays": ["a.npy", "b.npy"], "dataset": ["a.npy", "b.npy"], "sizes": [1, 2], "digest": [1], "ids": [7]},
    "booleans": dict.fromkeys(["is_replicated", "epoch", "prepare", "state_dict", "set_epoch", "close"], False),
    "methods of nothing": dict.fromkeys(["epoch", "prepare", "sizes", "order", "digest", "batch"], lambda: 3),
    "keywords": {"epoch": lambda *, number: [], "_workers": 4},
}


def test_attributes_that_mean_something_else_in_another_library_do_not_count(program, state, monkeypatch, subtests):
    for meaning in OTHER_MEANINGS:
        for kind in [Foreign, ForeignEpoch]:
            with subtests.test(kind=kind, meaning=meaning):
                data = kind()
                expected, facts = ledger(program, state, kind()), content_of(kind())
                for name, value in OTHER_MEANINGS[meaning].items():
                    if name != "epoch" or kind is Foreign:
                        setattr(data, name, value)
                assert ledger(program, state, data) == expected
                assert ledger(program, state, data, steps_per_call=2)[0] == expected[0]
                assert content_of(data) == facts
                data_source = DataSource(data, "train")
                data_source.open(1).take(1)
                data_source._adapter.kill()
                monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
                assert data_source.prefetch() == 4


def test_a_shuffled_stream_has_another_order_in_each_epoch_and_the_same_in_each_run(program, state, subtests):
    for kind in ["Hugging Face, shuffled shards", "Hugging Face, shuffle buffer", "torch, Hugging Face"]:
        with subtests.test(kind=kind):
            full, _ = ledger(program, state, KINDS[kind]())
            first, second = ([full[step] for step in range(start, start + 6)] for start in (1, 7))
            assert first != second
            assert ledger(program, state, KINDS[kind]())[0] == full


def test_data_that_cannot_be_iterated_is_refused():
    with pytest.raises(DataError, match="is a int, which cannot be iterated"):
        DataSource(3, "train")
