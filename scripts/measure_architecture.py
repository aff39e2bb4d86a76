"""Measures the architecture: frames above the user's loss, files that one batch passes, and the size of the code.

python scripts/measure_architecture.py            # print the tables
python scripts/measure_architecture.py --write    # also write them into docs/architecture.md
python scripts/measure_architecture.py --list     # also print the counted frames and files

What is counted:

Frames. A small model trains for two steps in each style, without validation. Its loss walks the Python stack from its
caller to the top and counts the frames whose file is in `src/jax_trainer`; frames of JAX, Flax, Optax, the standard
library and this script do not count. "Early trace" is the first call of the loss, which finds mistakes before anything
is written. "Running path" is the last call with a frame of `engine`, which has the loop. JAX reuses the early trace for
the first step; the second batch is smaller, so its step is traced inside the loop, below the frames that compile it.
With `debug: true`, a key of `TrainerModule` only, nothing is compiled, and the last call is the second step itself.

Files of one batch. `digits.yaml` trains with `fast_dev_run: 1`: one step, one validation batch, one checkpoint,
one test. A profile function (`sys.setprofile`, in all threads) records the file of every Python function of ours that
is called, except while a module is imported. "One batch" starts at the callback hook `on_training_epoch_start`, just
before the first batch is read, and ends at the `os.rename` that publishes the checkpoint. Compilation of the step and
validation are in between, and what other threads execute meanwhile counts too; the early trace of the loss is not. The
whole run starts before the YAML file is read, and ends when the results are returned.

Code. A line of code has a token other than a comment or a docstring; lines per file include the others. Classes and
functions include nested ones and methods, but not lambdas. Packages are the folders of `src/jax_trainer`; its single
files are one row. Lines of imports are those of import statements; lines of checks those of a `raise`, and of an `if`
that has only a `raise` as its body. Entries at the top are the folders and files of `src/jax_trainer`, without
`__init__`, `__main__` and `py.typed`.

One `fit`. An MLP on arrays, two epochs with evaluation and checkpoints, before anything else has run: the functions of
`src/jax_trainer` that are called at least once, in all threads, without bodies of modules and classes.

Knowledge. A file knows of several processes if one of its names (not a comment or a string) contains a word of
`PROCESS_WORDS`. A file knows linen from nnx if it imports `flax.linen` or `flax.nnx`; only the packages that define
modules may: `adapters`, `models`, and `testing` with its tiny models.
"""

import argparse
import ast
import inspect
import io
import os
import sys
import tempfile
import threading
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "jax_trainer"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
INTRODUCTION = """## Measured

`make measure` writes these tables; the docstring of `scripts/measure_architecture.py` defines what is counted. The
frames have two targets: counted by reading the running path, and in a real stack."""
PROCESS_WORDS = ("process_group", "is_multi_process", "process_index", "process_count", "this_process", "multihost")
MODEL_PACKAGES = ("adapters", "models", "testing")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


# code


class Size(NamedTuple):
    """The size of some code."""

    files: int
    all_lines: int
    lines: int
    classes: int
    functions: int
    imports: int = 0
    checks: int = 0

    def __add__(self, other: "Size") -> "Size":  # type: ignore[override]
        return Size(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def row(self) -> str:
        """The cells of a table."""
        return f"{self.files} | {self.lines:,} | {self.classes} | {self.functions:,}"

    def share(self, lines: int) -> str:
        """A share of the lines of code, in percent."""
        return f"{lines / self.lines:.1%}"

    @property
    def lines_per_file(self) -> int:
        """The mean number of all lines."""
        return round(self.all_lines / self.files)


def tokens_of(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of a module."""
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


def size_of(text: str) -> Size:
    """The size of one module."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {position for node in nodes if (position := _docstring_at(node)) is not None}
    lines: set[int] = set()
    for token in tokens_of(text):
        if token.type not in NOT_CODE and token.start not in docstrings:
            lines |= set(range(token.start[0], token.end[0] + 1))
    classes = sum(isinstance(node, ast.ClassDef) for node in nodes)
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    imports = _lines_of(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    checks = _lines_of(node for node in nodes if _is_check(node))
    return Size(1, len(text.splitlines()), len(lines), classes, functions, len(imports & lines), len(checks & lines))


def _lines_of(nodes: Iterable[ast.AST]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}  # type: ignore[attr-defined]


def _is_check(node: ast.AST) -> bool:
    """Whether it is a `raise`, or an `if` that does nothing else."""
    if isinstance(node, ast.If) and not node.orelse:
        return all(isinstance(statement, ast.Raise) for statement in node.body)
    return isinstance(node, ast.Raise)


def _docstring_at(node: ast.AST) -> tuple[int, int] | None:
    """Where the docstring of a module, class or function starts: (line, column)."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if ast.get_docstring(node, clean=False) is None:
        return None
    return node.body[0].lineno, node.body[0].col_offset


def knows_processes(text: str) -> bool:
    """Whether a module has a name that belongs to several processes."""
    names = (token.string for token in tokens_of(text) if token.type == tokenize.NAME)
    return any(word in name for name in names for word in PROCESS_WORDS)


def knows_flax_api(text: str) -> bool:
    """Whether a module imports `flax.linen` or `flax.nnx`, anywhere in it."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return any(f"{name}.".startswith(("flax.linen.", "flax.nnx.")) for name in imported)


class Code(NamedTuple):
    """What the source text alone says."""

    packages: dict[str, Size]
    entries: int
    process_files: list[str]
    flax_files: list[str]

    @property
    def total(self) -> Size:
        """The size of all packages together."""
        return sum(self.packages.values(), Size(0, 0, 0, 0, 0))


def measure_code(source: Path) -> Code:
    """Reads every module below `source`."""
    packages: dict[str, Size] = {}
    process_files, flax_files = [], []
    for file in sorted(source.rglob("*.py")):
        text, path = file.read_text(encoding="utf-8"), file.relative_to(source)
        package = path.parts[0] if len(path.parts) > 1 else "single files"
        packages[package] = packages.get(package, Size(0, 0, 0, 0, 0)) + size_of(text)
        process_files += [path.as_posix()] if knows_processes(text) else []
        flax_files += [path.as_posix()] if package not in MODEL_PACKAGES and knows_flax_api(text) else []
    ignored = ("__init__", "__main__", "__pycache__", "py.typed")
    entries = sum(not path.name.startswith(ignored) for path in source.iterdir())
    return Code(dict(sorted(packages.items())), entries, process_files, flax_files)


# frames


def path_in(source: str, code: CodeType) -> str | None:
    """The path of the code's file below the folder `source`; None: elsewhere."""
    return code.co_filename.removeprefix(source) if code.co_filename.startswith(source) else None


def our_frames(source: str) -> list[str]:
    """Our frames above the caller of this function, innermost first."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        path = path_in(source, frame.f_code)
        frames += [] if path is None else [f"{path}:{frame.f_code.co_qualname}"]
        frame = frame.f_back
    return frames


class Stacks(NamedTuple):
    """Our frames above the loss, innermost first: at its first call, and at its last one inside the loop."""

    early: list[str]
    running: list[str]


class Styles:
    """The same small training in each style; each function trains with a loss that calls `note`."""

    def __init__(self, folder: str) -> None:
        import numpy as np
        import optax

        from jax_trainer import ArrayLoader

        self.folder, self.optimizer = folder, optax.adam(1e-3)
        inputs = np.ones((6, 3), np.float32)
        self.data = ArrayLoader((inputs, inputs[:, :1]), 4)  # the second batch is smaller: traced in the loop

    def model(self, kind: str) -> Any:
        """A layer of linen or nnx."""
        from flax import linen as nn
        from flax import nnx

        return nn.Dense(1) if kind == "linen" else nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def trainer_module(self, kind: str, note: Callable[[], None], *, debug: bool = False) -> None:
        """`TrainerModule`."""
        from jax_trainer import TrainerModule
        from jax_trainer.logger import LoggerConfig

        class Regression(TrainerModule):
            """Least squares."""

            def batch_to_input(self, batch: Any) -> Any:
                return batch[0]

            def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
                note()
                return ((model(batch[0]) - batch[1]) ** 2).mean(), {}

            def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
                note()
                outputs, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
                return ((outputs - batch[1]) ** 2).mean(), (mutable, {})

        trainer = Regression(
            model=self.model(kind),
            optimizer=self.optimizer,
            exmp_input=next(iter(self.data)),
            train_epochs=1,
            enable_progress_bar=False,
            logger=LoggerConfig(log_dir=self.folder),
            debug=debug,
        )
        trainer.train_model(self.data)

    def fit(self, kind: str, note: Callable[[], None]) -> None:
        """`fit`."""
        from jax_trainer import fit

        def loss_fn(outputs: Any, targets: Any) -> Any:
            note()
            return ((outputs - targets) ** 2).mean()

        options: dict[str, Any] = {"log_dir": self.folder, "tensorboard": False, "progress": False}
        fit(self.model(kind), self.data, loss_fn=loss_fn, optimizer=self.optimizer, num_epochs=1, **options)

    def train_fn(self, kind: str, note: Callable[[], None]) -> None:
        """`train_fn`."""
        import jax
        from flax import nnx

        from jax_trainer import train_fn

        def loss_fn(model: Any, batch: Any) -> Any:
            note()
            return ((model(batch[0]) - batch[1]) ** 2).mean()

        def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
            return nnx.value_and_grad(loss_fn)(model, batch)

        model = self.model(kind)
        updater = nnx.Optimizer(model, self.optimizer, wrt=nnx.Param)
        steps = (train_step, train_step)  # without validation data, the second one is never called
        train = train_fn(fns=steps, n_steps=2, eval_every_n_steps=2, n_eval_batches=1, progress=False)
        train(jax.random.key(0), model, updater, self.data)

    def train_loop(self, kind: str, note: Callable[[], None]) -> None:
        """`TrainLoop`."""
        import jax

        from jax_trainer import TrainLoop, TrainTask

        def loss(outputs: Any, targets: Any) -> Any:
            note()
            return ((outputs - targets) ** 2).mean()

        model = self.model(kind)
        task = TrainTask(apply=model.apply, optimizer=self.optimizer, loss=loss, data=self.data)
        for _ in TrainLoop(init=model.init, task=task, rnkey=jax.random.key(0), n_steps=2, stdout=False):
            pass


class Style(NamedTuple):
    """A style to measure, and its targets: counted by reading the running path, and in a real stack."""

    name: str
    kind: str
    train: Callable[..., None]
    reading: str
    stack: str


STYLES = [
    Style("`TrainerModule`", "linen", Styles.trainer_module, "≤ 13", "≤ 13 (debug)"),
    Style("`TrainerModule`", "nnx", Styles.trainer_module, "≤ 13", "≤ 13 (debug)"),
    Style("`fit`", "linen", Styles.fit, "≤ 14", "≤ 10 (early)"),
    Style("`fit`", "nnx", Styles.fit, "≤ 14", "≤ 10 (early)"),
    Style("`train_fn`", "nnx", Styles.train_fn, "≤ 10", "≤ 6 (early)"),
    Style("`TrainLoop`", "linen", Styles.train_loop, "≤ 13", "–"),
]


def stacks_of(style: Style, **options: Any) -> Stacks:
    """Trains in a style, and returns the stacks of its loss."""
    from jax_trainer.core import RecompileWarning

    calls: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompileWarning)  # the smaller batch
        style.train(Styles(folder), style.kind, lambda: calls.append(our_frames(f"{SOURCE}{os.sep}")), **options)
    in_loop = [frames for frames in calls if any(frame.startswith("engine/") for frame in frames)]
    if not in_loop:
        raise RuntimeError(f"The loop never called the loss of {style.name}: no frame of `engine` was above it.")
    return Stacks(calls[0], in_loop[-1])


# files of one batch


class FileTrace:
    """Records the files below `source` whose functions are called: of one batch, and of the whole run.

    Args:
        source: a folder.
    """

    def __init__(self, source: Path) -> None:
        self.batch_files: set[str] = set()
        self.run_files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self._source, self.in_batch = f"{source}{os.sep}", False
        self._importing = threading.local()  # the depth of imports, by thread
        sys.addaudithook(self._audit)

    def __enter__(self) -> "FileTrace":
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # documented to accept None

    def start_batch(self) -> None:
        """Counts files to `batch_files` from now until a checkpoint is published."""
        self.in_batch = True

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.in_batch and event == "os.rename" and Path(os.fsdecode(args[1])).name.startswith("step_"):
            self.in_batch = False

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return"):
            return
        depth = getattr(self._importing, "depth", 0)
        if frame.f_code.co_name == "<module>":
            self._importing.depth = depth + (1 if event == "call" else -1)
        elif event == "call" and not depth:
            path = path_in(self._source, frame.f_code)
            if path is not None and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not the body of a class
                self.run_files.add(path)
                if not frame.f_code.co_name.startswith("<"):
                    self.functions.add((path, frame.f_code.co_qualname))
                if self.in_batch:
                    self.batch_files.add(path)


def trace_digits() -> FileTrace:
    """Trains `digits.yaml` for one step under a `FileTrace`."""
    from jax_trainer.callbacks import Callback
    from jax_trainer.trainer import build, load_experiment

    trace = FileTrace(SOURCE)

    class BatchStart(Callback):
        """Marks the start of the first epoch."""

        def on_training_epoch_start(self, epoch: int) -> None:
            trace.start_batch()

    with tempfile.TemporaryDirectory() as folder, trace:
        changes = ["trainer.fast_dev_run=1", "trainer.enable_progress_bar=false", f"trainer.logger.log_dir={folder}"]
        experiment = load_experiment(ROOT / "src/jax_trainer/configs" / "digits.yaml", changes).value
        trainer = build(experiment, callbacks=[BatchStart()])
        data = trainer.dataset
        trainer.train_model(data.train_loader, data.val_loader, data.test_loader)
    if trace.in_batch or not trace.batch_files:
        raise RuntimeError("The run published no checkpoint: no `os.rename` to a folder `step_…` was seen.")
    return trace


def trace_fit() -> FileTrace:
    """Trains an MLP on arrays with `fit` under a `FileTrace`."""
    import numpy as np
    import optax
    from flax import nnx

    from jax_trainer import fit

    random, rngs = np.random.default_rng(0), nnx.Rngs(0)
    arrays = random.standard_normal((256, 64)).astype(np.float32), random.integers(0, 10, 256).astype(np.int32)
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 10, rngs=rngs))
    loss_fn = optax.softmax_cross_entropy_with_integer_labels
    with tempfile.TemporaryDirectory() as folder, FileTrace(SOURCE) as trace:
        fit(model, arrays, arrays, loss_fn=loss_fn, optimizer=optax.adam(1e-3), num_epochs=2, log_dir=folder)
    return trace


# tables


def markdown(
    code: Code, stacks: dict[Style, Stacks], debug: dict[Style, Stacks], trace: FileTrace, fit: FileTrace
) -> str:
    """All tables."""
    tables = _total_rows(code, trace, fit), _package_rows(code), _frame_rows(stacks, debug)
    return "\n\n".join("\n".join(rows) for rows in tables)


def _frame_rows(stacks: dict[Style, Stacks], debug: dict[Style, Stacks]) -> Iterator[str]:
    yield "| frames above the loss | early trace | running path | with `debug` | target, read | target, stack |"
    yield "|---|---|---|---|---|---|"
    for style, found in stacks.items():
        with_debug = f"{len(debug[style].running)}" if style in debug else "–"
        counts = f"{len(found.early)} | {len(found.running)} | {with_debug}"
        yield f"| {style.name}, {style.kind} | {counts} | {style.reading} | {style.stack} |"


def _total_rows(code: Code, trace: FileTrace, fit: FileTrace) -> Iterator[str]:
    total = code.total
    yield "| | measured | drawing |"
    yield "|---|---|---|"
    yield f"| lines of code · files | {total.lines:,} · {total.files} | ≤ 30,000 · ≤ 230 |"
    yield f"| classes · functions | {total.classes} · {total.functions:,} | ≤ 500 · ≤ 3,200 |"
    yield f"| entries at the top of the package | {code.entries} | ≤ 19 |"
    shares = f"{total.share(total.imports)} · {total.share(total.checks)}"
    yield f"| lines of imports · of checks | {shares} | ≤ 9 % · ≤ 9 % |"
    yield f"| functions · files of one small `fit` | {len(fit.functions)} · {len(fit.run_files)} | ≤ 700 · ≤ 90 |"
    yield f"| files that one batch of `digits.yaml` passes | {len(trace.batch_files)} | ≤ 45 |"
    yield f"| files that know of several processes | {len(code.process_files)} | ≤ 6 |"
    yield f"| files outside `{'`, `'.join(MODEL_PACKAGES)}` that import linen or nnx | {len(code.flax_files)} | 0 |"


def _package_rows(code: Code) -> Iterator[str]:
    yield "| package | files | lines of code | classes | functions |"
    yield "|---|---|---|---|---|"
    for name, size in code.packages.items():
        yield f"| {name if name == 'single files' else f'`{name}`'} | {size.row} |"
    yield f"| **total** | {code.total.row} |"


def write_section(page: Path, text: str) -> None:
    """Replaces the measured section of the page, or appends one."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    if not begin:
        before = f"{before.rstrip()}\n\n{INTRODUCTION}\n\n"
    after = rest.partition(END)[2] if begin else "\n"
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Measures, prints, and writes if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/architecture.md")
    parser.add_argument("--list", action="store_true", help="also print the counted frames and files")
    args = parser.parse_args()
    import jax_trainer

    if Path(jax_trainer.__file__).parent != SOURCE:
        raise SystemExit(f"`jax_trainer` is imported from {jax_trainer.__file__}. Set PYTHONPATH={SOURCE.parent}.")
    fit = trace_fit()  # first: what is called once per process counts
    trace = trace_digits()
    code = measure_code(SOURCE)
    stacks = {style: stacks_of(style) for style in STYLES}
    debug = {style: stacks_of(style, debug=True) for style in STYLES if style.train is Styles.trainer_module}
    text = markdown(code, stacks, debug, trace, fit)
    sys.stdout.write(f"{text}\n")
    if args.list:
        for style, found in stacks.items():
            for label, frames in zip(("early trace", "running path"), found, strict=True):
                sys.stdout.write(f"\n{style.name}, {style.kind}, {label}:\n" + "".join(f"  {one}\n" for one in frames))
        for style, found in debug.items():
            sys.stdout.write(f"\n{style.name}, {style.kind}, debug:\n" + "".join(f"  {x}\n" for x in found.running))
        sys.stdout.write(f"\nFiles of several processes: {', '.join(code.process_files)}\n")
        sys.stdout.write(f"Files that import linen or nnx: {', '.join(code.flax_files) or 'none'}\n")
        sys.stdout.write("\nOne batch:\n" + "".join(f"  {path}\n" for path in sorted(trace.batch_files)))
    if args.write:
        write_section(PAGE, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
