"""Text: a small transformer that learns to write Python's documentation, character by character.

    python examples/text.py

The texts of `help()` come with Python. `LanguageModelTrainer` predicts the next character; `generate` writes.
"""
# Expected: fewer than 3 bits per character after about two minutes on two CPU cores.

from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np

from jax_trainer.callbacks import ModelCheckpoint
from jax_trainer.datasets.examples import TextConfig, TextDataset
from jax_trainer.logger import LoggerConfig
from jax_trainer.models import GPTConfig, generate
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.trainer import LanguageModelTrainer


def main(epochs: int = 5, out: str = "runs", characters: int = 400_000, width: int = 64) -> dict[str, float | str]:
    """Trains, and returns the bits per character of the test part and a text that the model wrote."""
    Path(out).mkdir(parents=True, exist_ok=True)
    text = "\n".join(topics[name] for name in sorted(topics))[:characters]
    (Path(out) / "topics.txt").write_text(text.encode("ascii", "ignore").decode())
    data = TextDataset(TextConfig(data_dir=out, path="topics.txt", context=64, global_batch_size=64))
    trainer = LanguageModelTrainer(
        model_config=GPTConfig(vocab_size=len(data.vocabulary), layers=2, heads=4, width=width),
        optimizer_config=AdamWConfig(learning_rate=3e-3),
        dataset=data,
        train_epochs=epochs,
        callbacks=[ModelCheckpoint(monitor="val/bits")],
        logger=LoggerConfig(log_dir=out),
    )
    results = trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
    model = trainer.bind_model()
    tokens = generate(model, jax.random.key(0), data.encode("The ")[None], 60, temperature=0.7)
    return {"bits": results["test"]["test/bits"], "text": data.decode(np.asarray(tokens[0]))}


if __name__ == "__main__":
    print(main())
