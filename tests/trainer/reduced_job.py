"""A run whose learning rate is reduced three times; the same command starts or resumes it.

`python reduced_job.py FOLDER`: writes `FOLDER/result.json` at the end. Where it is killed is in the environment.
"""

import json
import sys
from pathlib import Path

from trainer_runs import EXAMPLE, MODELS, Plain, first_examples, settings

from jax_trainer.callbacks import ModelCheckpointConfig, ReduceLROnPlateauConfig
from jax_trainer.optimizer import AdamWConfig, CosineScheduleConfig
from jax_trainer.testing import digest, numbered_loader

# nothing improves by that much
PLATEAU = ReduceLROnPlateauConfig(patience=1, cooldown=1, threshold=100.0, factor=0.5)
EPOCHS, STEPS = 7, 3


def main(folder: Path) -> None:
    trainer = Plain(
        model_config=MODELS["linen"](c_hid=8, num_classes=4),
        optimizer_config=AdamWConfig(learning_rate=CosineScheduleConfig(init_value=1e-2, steps=EPOCHS * STEPS)),
        exmp_input=EXAMPLE,
        callbacks=[PLATEAU, ModelCheckpointConfig()],
        **settings(folder, train_epochs=EPOCHS, check_val_every_n_epoch=1, resume="auto"),
    )
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64))
    (run,) = [path.parent for path in folder.rglob("metrics.jsonl")]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    checkpoints = sorted(run.rglob("checkpoint.json"), key=lambda path: path.parent.name)
    saved = [json.loads(path.read_text()) for path in checkpoints]
    result = {
        "state": digest(trainer.state),
        "rows": [{name: value for name, value in row.items() if not name.endswith("time")} for row in rows],
        "callbacks": [{"plateau": one["callbacks"].get("ReduceLROnPlateau"), "step": one["step"]} for one in saved],
        "edits": [one["run"]["loop"]["edits"] for one in saved],
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
