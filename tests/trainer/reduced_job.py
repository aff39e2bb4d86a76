"""A run whose learning rate is reduced several times; the same command starts or resumes it.

`python reduced_job.py FOLDER`: writes `FOLDER/result.json` at the end. Where it is killed is in the environment.
"""

import json
import sys
from pathlib import Path

from jax_trainer.callbacks import ModelCheckpointConfig, ReduceLROnPlateauConfig
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.optimizer import CosineScheduleConfig, SGDConfig
from jax_trainer.testing import digest
from tests.trainer.trainer_runs import plain_for, rows, train_plain

# nothing improves by that much: reductions after the evaluations at steps 8, 16 and 24
PLATEAU = ReduceLROnPlateauConfig(patience=0, cooldown=1, threshold=100.0, factor=0.5)


def main(folder: Path) -> None:
    trainer = plain_for(
        "linen",
        folder,
        optimizer=SGDConfig(learning_rate=CosineScheduleConfig(init_value=0.1, steps=24)),
        train_epochs=6,
        callbacks={"plateau": PLATEAU, "saver": ModelCheckpointConfig()},
    )
    train_plain(trainer, resume="auto")
    assert trainer.folder is not None
    saved = CheckpointStore(trainer.folder.checkpoints).latest()
    assert saved is not None
    result = {
        "state": digest(trainer.state),
        "rows": rows(trainer),
        "plateau": saved.callbacks["plateau"],
        "edits": saved.run["loop"]["edits"],
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
