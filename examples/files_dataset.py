"""A dataset of your own from files: one folder per class, one image per file, read while the model trains.

    python examples/files_dataset.py

Any object with a length and `__getitem__` can be read by Grain, in the background and in an order that resumes exactly.
The files here are the handwritten digits, written to a folder first; put your own there instead.
"""
# Expected: a validation accuracy above 0.9 after about 15 s on two CPU cores. Needs the extra `grain`.

from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

from jax_trainer import fit, load_digits
from jax_trainer.datasets.records import GrainLoader


def write_files(folder: Path) -> None:
    """The digits as `folder/train/3/00017.npy`, and so on."""
    for name, part in load_digits().items():
        for row, (image, label) in enumerate(zip(part["image"], part["label"], strict=True)):
            file = folder / name / str(label) / f"{row:05}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, image)


class ImageFolder:
    """The files below a folder as pairs (image, label); a label is the position of its folder's name."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(one.name for one in folder.iterdir() if one.is_dir())
        self.files = sorted(folder.rglob("*.npy"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.int32]:
        file = self.files[row]
        image = np.load(file, allow_pickle=False).reshape(-1).astype(np.float32) / 16
        return image, np.int32(self.classes.index(file.parent.name))


def main(epochs: int = 5, out: str = "runs/files") -> dict[str, Any]:
    """Writes the files, trains, and returns the validation accuracy."""
    folder = Path(out) / "digits"
    write_files(folder)
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
    train = GrainLoader(
        ImageFolder(folder / "train"), 60, shuffle=True, drop_last=True
    )  # threads=4: faster, if decoding is slow
    val = GrainLoader(ImageFolder(folder / "val"), 60)
    result = fit(
        model,
        train,
        val,
        loss_fn=optax.softmax_cross_entropy_with_integer_labels,
        eval_step=lambda model, batch: (model(batch[0]).argmax(-1) == batch[1]).mean(),
        optimizer=optax.adam(3e-3),
        num_epochs=epochs,
        log_dir=out,
        tensorboard=False,
    )
    return {"acc": result.history[epochs]["val/accuracy"], "files": len(list(folder.rglob("*.npy")))}


if __name__ == "__main__":
    print(main())
