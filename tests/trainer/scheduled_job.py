"""A run in which everything changes: batch sizes, micro-batches, what is trained, the loss scale; and its weights are
averaged at the end. The same command starts or resumes it.

`python scheduled_job.py FOLDER`: writes `FOLDER/result.json` at the end. Where it is killed is in the environment.
"""

import json
import sys
from pathlib import Path

from jax_trainer.callbacks import ModelCheckpointConfig, StochasticWeightAveragingConfig, UnfreezeConfig
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import ArrayLoader
from jax_trainer.optimizer import AdamWConfig, CosineScheduleConfig
from jax_trainer.testing import digest, numbered_data
from tests.trainer.trainer_runs import first_examples, plain_for, rows

EPOCHS, SIZES = 4, {0: 32, 2: 64}  # 4, 4, 2 and 2 steps
CALLBACKS = {
    "unfreeze": UnfreezeConfig(schedule={0: "out", 1: "hidden.linear", 2: "hidden"}),
    "averaging": StochasticWeightAveragingConfig(swa_epoch_start=3, swa_lrs=0.01, annealing_epochs=1),
    "saver": ModelCheckpointConfig(every_n_steps=3),
}


def main(folder: Path) -> None:
    trainer = plain_for(
        "nnx",
        folder,
        hidden=True,
        optimizer=AdamWConfig(learning_rate=CosineScheduleConfig(init_value=0.05)),
        train_epochs=EPOCHS,
        callbacks=CALLBACKS,
        precision="f16",
        accumulate={0: 1, 2: 2},
    )
    data = ArrayLoader(numbered_data(128), SIZES, shuffle=True)
    trainer.train_model(data, first_examples(64), resume="auto")
    assert trainer.folder is not None
    saved = CheckpointStore(trainer.folder.checkpoints).latest()
    assert saved is not None
    result = {"state": digest(trainer.state), "rows": rows(trainer), "edits": saved.run["loop"]["edits"]}
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
