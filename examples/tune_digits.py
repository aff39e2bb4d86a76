"""Search the best learning rate, weight decay, activation and batch size for 8×8 handwritten digits.

    python examples/tune_digits.py                 # 12 trials of a small network; bad ones are pruned after an epoch
    python examples/tune_digits.py --trials 20     # resumes the study: eight more
    python examples/tune_digits.py --storage sqlite:///digits.db     # in a database, shared by several processes

It is the same as

    jax-trainer tune digits --space digits --trials 12 --startup 3 --seed 0 \\
        'model={class_name: SimpleClassifier, num_classes: 10}' trainer.train_epochs=6

To tune your own, change the two files, or pass your own function to `tune` instead of the first.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console

from jax_trainer.tools.tuning import TuneResult, tune

CONFIGS = Path(__file__).parent.parent / "src/jax_trainer/configs"
SMALL = [
    "model={class_name: SimpleClassifier, num_classes: 10}",  # compiled in a second, where the CNN takes three
    "trainer.train_epochs=6",
]


def main() -> TuneResult:
    """Reads the command line, runs the study, shows the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--pruner", default="median", choices=["median", "halving", "hyperband", "none"])
    parser.add_argument("--storage", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs") / "tune" / "digits")
    args = parser.parse_args()

    began = time.perf_counter()
    found = tune(
        CONFIGS / "digits.yaml",
        CONFIGS / "spaces/digits.yaml",
        trials=args.trials,
        pruner=args.pruner,
        startup=3,  # after three trials, those worse than the median are pruned
        storage=args.storage,
        seed=args.seed,
        overrides=SMALL,
        folder=args.out,
    )
    steps = sum(trial["reports"] for trial in found.trials)
    console = Console()
    console.print(found)
    console.print(
        f"{len(found.trials)} trials in {time.perf_counter() - began:.1f} s; {found.count('pruned')} were pruned: "
        f"{steps} epochs were trained instead of {6 * len(found.trials)}.",
        soft_wrap=True,
    )
    console.print(f"Best: {found.monitor} {found.value} with {found.params}", soft_wrap=True)
    console.print(f"Next: `jax-trainer train {found.config}`", soft_wrap=True)
    return found


if __name__ == "__main__":
    main()
