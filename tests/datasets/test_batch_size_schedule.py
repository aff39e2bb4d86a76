"""The batch size of our loaders may change from epoch to epoch, as a pure function of the epoch."""

import numpy as np
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import ArrayLoader, DatasetConfig, DatasetModule, DataSource
from jax_trainer.datasets.records import GrainLoader

SIZES, EXAMPLES = {0: 4, 2: 10, 3: 5}, 23
OF_EPOCH = [4, 4, 10, 5, 5]
KINDS = {
    "arrays": lambda **options: ArrayLoader(np.arange(EXAMPLES), SIZES, **options),
    "transformed": lambda **options: ArrayLoader(
        np.arange(EXAMPLES), SIZES, record_transform=lambda one, rng: one, **options
    ),
    "records": lambda **options: GrainLoader(range(EXAMPLES), SIZES, read_ahead=2, **options),
    "records, one by one": lambda **options: GrainLoader(range(EXAMPLES), SIZES, read_ahead=0, **options),
}


def test_each_epoch_has_its_size_and_all_examples_and_can_be_entered_anywhere(subtests):
    for drop_last in [False, True]:
        for kind in KINDS:
            with subtests.test(kind=kind, drop_last=drop_last):
                loader = KINDS[kind](shuffle=True, drop_last=drop_last)
                for epoch, size in enumerate(OF_EPOCH, 1):
                    batches = [np.asarray(batch).tolist() for batch in loader.epoch(epoch)]
                    full, rest = divmod(EXAMPLES, size)
                    assert [len(batch) for batch in batches] == [size] * full + ([] if drop_last else [rest])
                    plain = ArrayLoader(np.arange(EXAMPLES), size, shuffle=True, drop_last=drop_last)
                    assert batches == [batch.tolist() for batch in plain.epoch(epoch)]
                    assert [np.asarray(batch).tolist() for batch in loader.epoch(epoch, 1)] == batches[1:]
                    source = DataSource(loader, "train")
                    assert (source.length_in(epoch), source.full_batch(epoch)) == (len(batches), size)
                assert loader.lengths == {0: 6 - drop_last, 2: 3 - drop_last, 3: 5 - drop_last}


def module(**options):
    arrays = np.zeros((32, 2), np.float32), np.zeros(32, np.int32)
    return DatasetModule(DatasetConfig(**options), train=arrays, val=arrays)


def test_a_dataset_trains_with_its_schedule_and_evaluates_with_its_batch_size():
    data = module(global_batch_size=8, batch_size_schedule={2: 16})
    assert data.train_loader.schedule.sizes == {0: 8, 2: 16}
    assert data.val_loader.schedule.sizes is None and data.val_loader.batch_size == 8
    assert module(batch_size_schedule={0: 4}, global_batch_size=4).train_loader.lengths == {0: 8}


def test_sizes_that_contradict_each_other_or_the_data_are_refused(subtests):
    for options, named in [
        ({"batch_size_schedule": {0: 4}, "global_batch_size": 8}, "batch_size_schedule.*4.*8"),
        ({"batch_size_schedule": {1: 64}, "global_batch_size": 8}, "32 examples.*64"),
        ({"batch_size_schedule": {1: 0}}, "batch_size_schedule.*0"),
    ]:
        with subtests.test(options=options, named=named), pytest.raises(SettingsError, match=named):
            module(**options)
