"""Records a real run of `jax-trainer train digits` as a picture of a terminal, for the front page.

python scripts/record_run.py docs/images/run.svg
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
COMMAND = "jax-trainer train digits"
WIDTH = 96
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def lines_of_a_run() -> list[str]:
    """What the command prints, with the run folder as seen from the working directory."""
    # without a cache of compiled programs, whose folder it would name
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT / "src")}
    environment["JAX_TRAINER_COMPILATION_CACHE"] = "off"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jax_trainer", *COMMAND.split()[1:]]
        together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=folder, env=environment, check=True, **together)
        return done.stdout.replace(f"{Path(folder).resolve()}/", "").splitlines()


def shortened(lines: list[str], epochs: int = 3) -> list[str]:
    """The lines of the first and the last epochs, and all that is no epoch."""
    numbers = [int(match[1]) if (match := re.match(r"epoch +(\d+)/", line)) else 0 for line in lines]
    kept = [line for line, number in zip(lines, numbers, strict=True) if not epochs < number < max(numbers)]
    first_left_out = next((index for index, number in enumerate(numbers) if number > epochs), len(lines))
    return [*kept[:first_left_out], "⋮", *kept[first_left_out:]] if len(kept) < len(lines) else lines


def picture(lines: list[str]) -> str:
    """An SVG of a terminal; its fonts are those of the reader's machine."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text.assemble(("$ ", "bold green"), (COMMAND, "bold")))
    for line in (*lines, ""):  # the last line of a picture is cut off at its lower edge
        console.print(Text(line), soft_wrap=True, crop=True)
    style = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    style = style.replace("Fira Code, monospace", FONTS)
    svg = console.export_svg(title="", code_format=style, unique_id="run")
    if "http" in svg.replace("http://www.w3.org/2000/svg", ""):
        raise RuntimeError("The picture would load something from elsewhere.")
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "docs" / "images" / "run.svg")
    parser.parse_args().out.write_text(picture(shortened(lines_of_a_run())), encoding="utf-8")


if __name__ == "__main__":
    main()
