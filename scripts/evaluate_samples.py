"""Evaluates generative models by a classifier: the share of samples that it assigns to their intended class.

    python scripts/evaluate_samples.py src/jax_trainer/configs/digits_flow.yaml …          # trains, then evaluates
    python scripts/evaluate_samples.py runs/DiT/20261116-120000 …          # evaluates existing runs

A GAN draws samples of no particular class: `recognised` is the share to which the classifier assigns a class with more
than 90 % confidence, and `worst class` the share of the rarest class among them, where 10 % is even. `--picture` writes
an image of samples of the last model.

The teacher of a distilled model is the model before it. Trains the classifier `digits.yaml` first, unless
`--classifier` names a run of it. Draws `--per-class` samples of every class with the averaged weights of the best
checkpoint. `drawn per second` excludes compilation. `apart` is the distance to the nearest training image, relative
to that of real test images; 0 for copies.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_trainer.callbacks.sampling import grid
from jax_trainer.logger.values import png_of
from jax_trainer.trainer import GANTrainer, ImgClassifierTrainer, TrainerModule, build, load_experiment

CONFIGS = Path(__file__).parent.parent / "src/jax_trainer/configs"
CONFIDENCE = 0.9
show = Console(highlight=False, markup=False, soft_wrap=True).print


def trained(file: Path, overrides: list[str]) -> tuple[Path, float]:
    """Trains the experiment of a file; returns its run folder and the seconds."""
    began = time.perf_counter()
    trainer = build(load_experiment(file, overrides).value)
    data = trainer.dataset
    trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
    return trainer.folder.path, time.perf_counter() - began


def load_classifier(run: Path) -> Any:
    """The classifier of a run; prints its accuracy on real test images."""
    trainer: Any = ImgClassifierTrainer.load_from_checkpoint(run)
    accuracy = trainer.test_model(trainer.dataset.test_loader)["test/acc"]
    show(f"The classifier {run} recognises {accuracy:.1%} of the real test images.")
    return trainer.bind_model(transforms=False)  # samples are like transformed images


def evaluated(run: Path, classifier: Any, per_class: int, seed: int) -> dict[str, float]:
    """The share of samples of a run that the classifier recognises, and how fast they were drawn."""
    trainer: Any = TrainerModule.load_from_checkpoint(run)
    classes = trainer.dataset.config.num_classes
    labels = np.repeat(np.arange(classes), per_class)
    jax.block_until_ready(trainer.sample(seed, labels))  # compiles
    began = time.perf_counter()
    samples = jax.block_until_ready(trainer.sample(seed, labels))
    seconds = time.perf_counter() - began
    guessed = jax.nn.softmax(classifier(samples))
    if isinstance(trainer, GANTrainer):
        is_clear = np.asarray(guessed.max(-1) > CONFIDENCE)
        share, shares = is_clear.mean(), np.bincount(np.asarray(guessed.argmax(-1))[is_clear], minlength=classes)
        worst = shares.min() / max(1, shares.sum())
    else:
        per_label = (np.asarray(jnp.argmax(guessed, axis=-1)) == labels).reshape(classes, per_class).mean(1)
        share, worst = per_label.mean(), per_label.min()
    return {
        "recognised": float(share),
        "worst": float(worst),
        "per_second": len(labels) / seconds,
        "apart": novelty(np.asarray(samples), trainer),
    }


def novelty(samples: np.ndarray, trainer: Any, most: int = 300) -> float:
    """The distance to the nearest training image, relative to that of real test images; 0 for copies."""
    known, new = (
        _preprocessed(trainer, part).reshape(len(part), -1) for part in (trainer.dataset.train, trainer.dataset.test)
    )
    some = samples[np.random.default_rng(0).permutation(len(samples))[:most]].reshape(-1, known.shape[1])
    return float(np.median(_nearest(some, known)) / np.median(_nearest(new[:most], known)))


def _preprocessed(trainer: Any, part: Any) -> np.ndarray:
    return np.asarray(trainer.dataset.transforms.apply(jax.random.key(0), part, train=False).input)


def _nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    squared = (points**2).sum(1)[:, None] + (others**2).sum(1) - 2 * points @ others.T
    return np.sqrt(np.maximum(squared, 0).min(axis=1))


def draw(run: Path, file: Path, seed: int) -> None:
    """Writes ten samples of each class of a run (of a GAN: a hundred) as one image."""
    trainer: Any = TrainerModule.load_from_checkpoint(run)
    samples = np.asarray(trainer.sample(seed, np.tile(np.arange(10), 10)))
    pixels = (255 * grid(trainer.dataset.pixels(samples), 10)).clip(0, 255).astype(np.uint8)
    file.write_bytes(png_of(pixels))


def main() -> None:
    """Trains the given files, and evaluates all models."""
    parser = argparse.ArgumentParser(description="Evaluates samples of generative models by a classifier.")
    configured = [CONFIGS / f"digits_{name}.yaml" for name in ("flow", "edm", "distillation", "consistency", "gan")]
    parser.add_argument("models", nargs="*", type=Path, default=configured, help="YAML files to train, or run folders")
    parser.add_argument("--classifier", type=Path, help="the run folder of a classifier (default: trains one)")
    parser.add_argument("--per-class", type=int, default=100, help="samples of each class (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the files")
    parser.add_argument("--picture", type=Path, help="write an image of samples of the last model")
    options = parser.parse_args()
    classifier = load_classifier(options.classifier or trained(CONFIGS / "digits.yaml", [])[0])
    table = Table("model", "trained in", "recognised", "worst class", "apart", "drawn per second", "run")
    run = None
    for model in options.models:
        distils = model.is_file() and "ConsistencyDistillation" in model.read_text(encoding="utf-8")
        teacher = [f"trainer.teacher={run}"] if distils and run is not None else []
        run, seconds = (model, None) if model.is_dir() else trained(model, [*teacher, *options.set])
        found = evaluated(run, classifier, options.per_class, options.seed)
        took = "" if seconds is None else f"{seconds:.0f} s"
        shares = (f"{found['recognised']:.1%}", f"{found['worst']:.0%}", f"{found['apart']:.2f}")
        table.add_row(model.stem, took, *shares, f"{found['per_second']:.0f}", str(run))
    show(table)
    if options.picture is not None and run is not None:
        draw(run, options.picture, options.seed)


if __name__ == "__main__":
    main()
