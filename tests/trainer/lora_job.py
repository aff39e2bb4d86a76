"""A run with LoRA over the weights of another run; the same command starts or resumes it.

`python lora_job.py FOLDER`: writes `FOLDER/result.json` at the end. Where it is killed is in the environment.
"""

import json
import sys
from pathlib import Path

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.core import digest_of
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.runs.sections import LoRAConfig
from jax_trainer.testing import digest
from tests.trainer.trainer_runs import plain_for, rows, train_plain

LORA = LoRAConfig(match=".*kernel", rank=2, dropout=0.2)


def main(folder: Path) -> None:
    trainer = plain_for(
        "nnx",
        folder / "runs",
        hidden=True,
        optimizer=AdamWConfig(learning_rate=0.01),
        train_epochs=3,
        ema=0.9,
        lora=LORA,
        init_from=str(next((folder / "base").glob("*"))),
        callbacks={"saver": ModelCheckpointConfig(every_n_steps=3)},
    )
    train_plain(trainer, resume="auto")
    result = {"state": digest(trainer.state), "base": digest_of(trainer.state.frozen), "rows": rows(trainer)}
    (folder / "result.json").write_text(json.dumps(result))


def prepare(folder: Path) -> None:
    """Trains the base."""
    train_plain(plain_for("nnx", folder / "base", hidden=True, callbacks={"saver": ModelCheckpointConfig()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
