"""Takes a picture of a report with headless Chromium. Needs the extra `plots`, and `chromium` on the path.

python scripts/picture_report.py docs/images/report.png runs/CNN/20261115-142311 runs/CNN/20261115-150102
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from jax_trainer.tools.reports import report

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=3000"
)


def picture(page: Path, out: Path, *, top: int, height: int, is_dark: bool) -> None:
    """Opens `page` and writes what is seen to `out`, with few colours so that the file is small."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed: `apt-get install chromium`.")
    with tempfile.TemporaryDirectory() as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
        options = [*FLAGS.split(), scheme, f"--user-data-dir={profile}", f"--window-size=1280,{top + height}"]
        subprocess.run([browser, *options, f"--screenshot={out}", page.as_uri()], check=True, capture_output=True)
    Image.open(out).convert("RGB").crop((0, top, 1280, top + height)).quantize(64).save(out, optimize=True)


def main() -> None:
    """Reads the command line, writes a report to a temporary folder and the picture of it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a .png file")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--top", type=int, default=0, help="pixels of the page above the picture")
    parser.add_argument("--height", type=int, default=1000, help="pixels of the page that are seen")
    parser.add_argument("--dark", action="store_true", help="with the dark colours")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = report(*args.runs).save(Path(folder) / "report.html")
        picture(page, args.out.absolute(), top=args.top, height=args.height, is_dark=args.dark)


if __name__ == "__main__":
    main()
