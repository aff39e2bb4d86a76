"""Names from users or files: validated paths inside a folder, and safe text for messages."""

import reprlib
import unicodedata
from pathlib import Path, PureWindowsPath

MAX_BYTES = 200  # file systems allow 255; suffixes and temporary names need some of them
_DEVICES = {"CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"} | {
    f"{port}{number}" for port in ("COM", "LPT") for number in "0123456789¹²³"
}
_CONTROL = {"Cc", "Zl", "Zp"}  # control characters, and those that break a line

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def safe_join(root: Path, name: str) -> Path:
    """The path of `name` directly inside `root`; a name that leads elsewhere is an error.

    >>> safe_join(Path("runs"), "first try").as_posix()
    'runs/first try'
    """
    if problem := _problem(name) or _leaves(root, name):
        raise ValueError(
            f"{shown(name)} cannot be the name of a file or folder: it {problem}. "
            "Use letters, digits, `-`, `_` and `.`, for example `run-1`."
        )
    return root / name


def shown(value: object) -> str:
    """A value for a message: short, on one line, without control characters."""
    return _repr.repr(value)


def label(name: str) -> str:
    """A name from a file for a message: unchanged unless it is long or not printable."""
    return name if name.isprintable() and len(name) < MAX_BYTES else shown(name)


def _problem(name: str) -> str:
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not text"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    reasons = {
        "is empty": not name,
        f"has {size} bytes, more than {MAX_BYTES}": size > MAX_BYTES,
        "refers to another folder": name in (".", ".."),
        "contains a path separator": "/" in name or "\\" in name,
        "names a drive": bool(PureWindowsPath(name).drive),
        "contains a control character": any(unicodedata.category(letter) in _CONTROL for letter in name),
        "ends in a dot or a space, which Windows drops": name.endswith((".", " ")),
        "is a device on Windows": name.split(".")[0].rstrip().upper() in _DEVICES,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _leaves(root: Path, name: str) -> str:
    try:
        inside = (root / name).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a loop of links; the type depends on the version of Python
        return f"is a link in {root} that leads nowhere"
    return "" if inside else f"is a link that leads out of {root}"
