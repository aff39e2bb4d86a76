"""What a classifier recognises in the samples of generative models: the share that it takes for what they were to be.

    python scripts/evaluate_samples.py configs/digits_flow.yaml …          # trains, then judges
    python scripts/evaluate_samples.py runs/DiT/20261116-120000 …          # judges runs that are there

A model that is distilled has the one before it as its teacher. Trains `configs/digits.yaml` first, as the judge,
unless `--judge` names a run of it. Draws `--per-class` samples of every class with the averaged weights of the best
checkpoint. `drawn per second` is without compiling. `apart` is the distance to the nearest training image, compared
with that of real test images: copies would be at 0.
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

from jax_trainer.trainer import GenerativeTrainer, ImgClassifierTrainer, build, load_experiment

CONFIGS = Path(__file__).parent.parent / "configs"
say = Console(highlight=False, markup=False, soft_wrap=True).print


def trained(file: Path, overrides: list[str]) -> tuple[Path, float]:
    """The run folder of what a file describes, trained, and how many seconds that took."""
    began = time.perf_counter()
    trainer = build(load_experiment(file, overrides).value)
    data = trainer.dataset
    trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
    return trainer.folder.path, time.perf_counter() - began


def judge_in(run: Path) -> Any:
    """The classifier of a run, which says how well it knows real images."""
    trainer: Any = ImgClassifierTrainer.load_from_checkpoint(run)
    accuracy = trainer.test_model(trainer.dataset.test_loader)["test/acc"]
    say(f"The judge, {run}, recognises {accuracy:.1%} of the real test images.")
    return trainer.bind_model()


def evaluated(run: Path, classifier: Any, per_class: int, seed: int) -> dict[str, float]:
    """What the classifier takes the samples of a run for."""
    trainer: Any = GenerativeTrainer.load_from_checkpoint(run)
    classes = trainer.dataset.config.num_classes
    labels = np.repeat(np.arange(classes), per_class)
    jax.block_until_ready(trainer.sample(seed, labels))  # compiles
    began = time.perf_counter()
    samples = jax.block_until_ready(trainer.sample(seed, labels))
    seconds = time.perf_counter() - began
    guessed = np.asarray(jnp.argmax(classifier(samples), axis=-1))
    per_label = (guessed == labels).reshape(classes, per_class).mean(1)
    return {
        "recognised": float(per_label.mean()),
        "worst": float(per_label.min()),
        "per_second": len(labels) / seconds,
        "apart": novelty(np.asarray(samples), trainer),
    }


def novelty(samples: np.ndarray, trainer: Any, most: int = 300) -> float:
    """How far samples are from the nearest training image, of which real test images are 1 away: copies would be 0."""
    known, new = (
        _as_seen(trainer, part).reshape(len(part), -1) for part in (trainer.dataset.train, trainer.dataset.test)
    )
    some = samples[np.random.default_rng(0).permutation(len(samples))[:most]].reshape(-1, known.shape[1])
    return float(np.median(_nearest(some, known)) / np.median(_nearest(new[:most], known)))


def _as_seen(trainer: Any, part: Any) -> np.ndarray:
    return np.asarray(trainer.dataset.transforms.apply(jax.random.key(0), part, train=False).input)


def _nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    squared = (points**2).sum(1)[:, None] + (others**2).sum(1) - 2 * points @ others.T
    return np.sqrt(np.maximum(squared, 0).min(axis=1))


def main() -> None:
    """Trains what has to be trained, and judges all of it."""
    parser = argparse.ArgumentParser(description="What a classifier recognises in samples of generative models.")
    parser.add_argument("given", nargs="+", type=Path, help="YAML files to train, or run folders")
    parser.add_argument("--judge", type=Path, help="the run folder of a classifier; left out, one is trained")
    parser.add_argument("--per-class", type=int, default=100, help="samples of each class (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value of a file's key")
    options = parser.parse_args()
    evaluate = judge_in(options.evaluate or trained(CONFIGS / "digits.yaml", [])[0])
    table = Table("model", "trained in", "recognised", "worst class", "apart", "drawn per second", "run")
    run = None
    for given in options.given:
        distils = given.is_file() and "ConsistencyDistillation" in given.read_text(encoding="utf-8")
        teacher = [f"trainer.teacher={run}"] if distils and run is not None else []
        run, seconds = (given, None) if given.is_dir() else trained(given, [*teacher, *options.set])
        found = evaluated(run, evaluate, options.per_class, options.seed)
        took = "" if seconds is None else f"{seconds:.0f} s"
        shares = (f"{found['recognised']:.1%}", f"{found['worst']:.0%}", f"{found['apart']:.2f}")
        table.add_row(given.stem, took, *shares, f"{found['per_second']:.0f}", str(run))
    say(table)


if __name__ == "__main__":
    main()
