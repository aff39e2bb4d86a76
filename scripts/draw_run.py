"""Draws curves of a run from its `metrics.jsonl`. Needs the extra `plots`.

python scripts/draw_run.py runs/CNN/20261115-142311 curve.svg train/acc_epoch val/acc
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def curve(rows: list[dict], name: str) -> tuple[list[float], list[float]]:
    """The epochs and values of a logged metric."""
    points = [(row["epoch"], row[name]) for row in rows if name in row and "epoch" in row]
    return [x for x, _ in points], [y for _, y in points]


def draw(rows: list[dict], names: list[str]) -> Figure:
    """One panel per last part of a name, such as acc, with a line for each of its names."""
    kinds = {name: name.rpartition("/")[2].removesuffix("_epoch") for name in names}
    shown = list(dict.fromkeys(kinds.values()))
    figure = Figure(figsize=(4.5 * len(shown), 3), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name in names:
            if kinds[name] == kind:
                axes.plot(*curve(rows, name), marker=".", label=name)
        axes.set(xlabel="epoch", title=kind)
        axes.legend()
        axes.grid(alpha=0.3)
    return figure


def main() -> None:
    """Reads the command line and writes the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="an .svg or .png file")
    parser.add_argument("names", nargs="+", help="metrics, such as val/acc")
    args = parser.parse_args()
    rows = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    if missing := [name for name in args.names if not curve(rows, name)[0]]:
        there = sorted({name for row in rows if "epoch" in row for name in row} - {"step", "epoch"})
        parser.error(f"no metric {missing[0]!r} in this run. Logged metrics: {', '.join(there)}.")
    draw(rows, args.names).savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
