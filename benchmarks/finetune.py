"""The commands of the tutorial fine-tune-and-export on GPT-2 with random weights: seconds of each, and tokens/s.

    python benchmarks/finetune.py [--steps 200] [--set dataset.global_batch_size=16] [--folder FOLDER]
    python benchmarks/finetune.py --tiny             # a small model, to try the script itself

Nothing is downloaded. Each command is a process, as in the tutorial. What needs an optional package that is missing is
left out, and listed: the import (safetensors; a run of one step is the base then), a tokenizer (tokenizers; a token is
a byte then), the folder for transformers (transformers, torch). The tokens/s of the training are those of its median
step, without compiling. A report, not a test.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "src/jax_trainer/configs/finetune_lora.yaml"
END = "<|endoftext|>"
TINY = {"vocab_size": 512, "context": 64, "layers": 2, "heads": 4, "width": 64}
GPT2 = {"vocab_size": 50257, "context": 1024, "layers": 12, "heads": 12, "width": 768}
EVALUATED = 10  # batches of validation, and of the test
PACKAGES = {
    "safetensors": "import, and weights beside the exported program",
    "tokenizers": "a tokenizer",
    "transformers": "export --to hf, which is compared with it",
    "torch": "export --to hf, which is compared with it",
}
echo = Console(highlight=False, markup=False, soft_wrap=True).print


def write_text(file: Path, letters: int) -> None:
    """Documents of random words, some more frequent than others."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 8))) for _ in range(3000)]
    weights = [1 / (number + 10) for number in range(len(words))]
    documents, size = [], 0
    while size < letters:
        documents.append(" ".join(rng.choices(words, weights, k=rng.randint(30, 300))) + ".")
        size += len(documents[-1]) + 2
    file.write_text("\n\n".join(documents) + "\n")


def write_checkpoint(folder: Path, sizes: dict[str, int], text: Path) -> None:
    """A folder in Hugging Face format: random weights of GPT-2, and a tokenizer if that package is there."""
    from flax import nnx

    from jax_trainer import export_pretrained
    from jax_trainer.models import GPT, GPTConfig

    config = GPTConfig(**sizes, bias=True, norm_epsilon=1e-5)  # type: ignore[arg-type]
    export_pretrained(GPT(config, rngs=nnx.Rngs(0)), folder)
    if has("tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        inner: Any = Tokenizer(models.BPE())
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        options: Any = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
        size = min(8192, sizes["vocab_size"])
        inner.train([str(text)], trainers.BpeTrainer(vocab_size=size, **options))
        inner.save(str(folder / "tokenizer.json"))


def has(*packages: str) -> bool:
    """Whether all of these packages are installed."""
    return all(find_spec(one) is not None for one in packages)


class Way:
    """Runs commands in a folder, and keeps their seconds.

    Args:
        folder: where everything is written.
        overrides: of the file.
    """

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder, self.overrides = folder, list(overrides)
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # also without an installation
        self.rows: list[tuple[str, float, str]] = []

    def run(self, *words: str) -> dict[str, Any]:
        """The result of a command of `jax-trainer`."""
        began = time.perf_counter()
        command = [sys.executable, "-m", "jax_trainer", *words, "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - began
        shown = "jax-trainer " + " ".join(word for word in words if "=" not in word)
        echo(f"{seconds:7.1f} s  {shown}")
        if done.returncode:
            raise SystemExit(f"`{shown}` ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        self.rows.append((shown, seconds, ""))
        return json.loads(done.stdout)

    def note(self, text: str) -> None:
        """Adds what the last command has measured."""
        command, seconds, _ = self.rows[-1]
        self.rows[-1] = (command, seconds, text)


def import_base(way: Way, args: argparse.Namespace, sizes: dict[str, int]) -> None:
    """The base: an imported checkpoint; without safetensors, a run of one step."""
    if has("safetensors"):
        written = [sys.executable, __file__, "--checkpoint", "gpt2", *(["--tiny"] if args.tiny else [])]
        environment = {**way.environment, "JAX_PLATFORMS": "cpu"}  # the memory of the device is for the others
        subprocess.run(written, cwd=way.folder, env=environment, check=True)
        found = way.run("import", "gpt2", "-o", "base")
        way.note(f"{found['parameters']:,} parameters")
    else:
        first = ["trainer.init_from=null", "trainer.lora=null", "trainer.max_steps=1", "optimizer.learning_rate=1e-6"]
        found = way.run("train", str(CONFIG), *way.overrides, *first, "trainer.logger.log_dir=bases")
        way.note("the base, of one step: safetensors is missing")
        (way.folder / "base").symlink_to(found["run"])


def train(way: Way, batch: int, context: int) -> str:
    """Trains the adapters; returns the run folder."""
    run = way.run("train", str(CONFIG), *way.overrides)["run"]
    lines = (way.folder / run / "metrics.jsonl").read_text().splitlines()
    steps = [one["throughput/step_time"] for one in map(json.loads, lines) if "throughput/step_time" in one]
    saved = max((way.folder / run / "checkpoints").iterdir())
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    speed = f"{batch * context / steps[-1]:,.0f} tokens/s, {1000 * steps[-1]:.1f} ms per step"
    way.note(f"{speed}, checkpoint {size / 1e6:.1f} MB")
    return run


def export(way: Way, run: str) -> None:
    """Exports the run in the formats that can be checked here."""
    formats = "stablehlo,hf" if has("safetensors", "torch", "transformers") else "stablehlo"
    place = "beside" if has("safetensors") else "embedded"
    found = way.run("export", run, "--to", formats, "--weights", place, "-o", "model")
    checks = found["checks"].items()
    way.note(", ".join(f"{name} ±{one['difference']:.2g} on {one['examples']} examples" for name, one in checks))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the commands of the tutorial fine-tune-and-export.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps per epoch, of two")
    parser.add_argument("--tiny", action="store_true", help="a small model instead of GPT-2")
    parser.add_argument("--folder", type=Path, help="folder for all files (default: a temporary one)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the file")
    parser.add_argument("--checkpoint", type=Path, help="only write a checkpoint to this folder")
    args = parser.parse_args()
    sizes = TINY if args.tiny else GPT2
    if args.checkpoint is not None:
        write_checkpoint(args.checkpoint, sizes, Path("notes.txt"))
        return
    missing = [f"{name} ({what})" for name, what in PACKAGES.items() if not has(name)]
    if missing:
        echo(f"Not installed: {', '.join(missing)}.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder.resolve(), args, sizes)


def measure(folder: Path, args: argparse.Namespace, sizes: dict[str, int]) -> None:
    """Runs the commands, and prints the table."""
    given = dict(one.split("=", 1) for one in args.set)
    batch, context = int(given.get("dataset.global_batch_size", 8)), sizes["context"]
    is_tokenized = has("safetensors", "tokenizers")
    tokens = (args.steps + 2 * EVALUATED) * batch * context
    write_text(folder / "notes.txt", letters=int(tokens * 1.1 * (6 if is_tokenized else 1)))
    overrides = [f"model.{name}={value}" for name, value in sizes.items()]
    overrides += [f"dataset.context={context}", f"dataset.limit_train_size={args.steps * batch}"]
    overrides += ["trainer.train_epochs=2", f"trainer.limit_val_batches={EVALUATED}"]
    overrides += [f"trainer.limit_test_batches={EVALUATED}", "trainer.logger.log_steps_every=10"]
    if not is_tokenized:
        overrides += ["dataset.tokenizer=null", "dataset.end_of_text=null", "dataset.level=byte"]
    way = Way(folder, [*overrides, *args.set])
    import_base(way, args, sizes)
    run = train(way, batch, context)
    tested = way.run("test", run)["metrics"]["test"]
    way.note(f"perplexity {tested['test/perplexity']:.1f}")
    export(way, run)
    table = Table("command", "seconds", "")
    for command, seconds, note in way.rows:
        table.add_row(command.replace(str(ROOT) + "/", "").replace(run, "RUN"), f"{seconds:.1f}", note)
    Console().print(table)


if __name__ == "__main__":
    main()
