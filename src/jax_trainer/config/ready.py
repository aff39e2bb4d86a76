"""The configurations that ship with the package: where they are, and what their headers say."""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "configs"
SPACES = FOLDER / "spaces"
_FACT = re.compile(r"^# (Data|Device|Expected): (.+?)(?: on two CPU cores.*)?[.,]?$", re.MULTILINE)


@dataclass(frozen=True)
class ReadyConfig:
    """A configuration of the package, as the comments at the top of its file describe it.

    Args:
        name: what `jax-trainer train` takes.
        summary: what it trains.
        data: the files that it needs.
        device: what it is meant for.
        expected: the result.
    """

    name: str
    summary: str
    data: str
    device: str
    expected: str

    @classmethod
    def of(cls, file: Path) -> "ReadyConfig":
        """What the header of `file` says; raises if a line of it is missing."""
        text = file.read_text(encoding="utf-8")
        facts = dict(_FACT.findall(text))
        if missing := {"Data", "Device", "Expected"} - facts.keys():
            raise ValueError(f"{file} has no line `# {min(missing)}: …` in its header.")
        summary = text.partition("\n")[0].removeprefix("# ").rstrip(".")
        return cls(file.stem, summary, facts["Data"], facts["Device"], facts["Expected"])


def ready_names() -> list[str]:
    """The names of all configurations of the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def config_path(name: str | Path, folder: Path = FOLDER) -> Path:
    """The file that `name` means: its path, or the name of a configuration of the package; a file of the user wins.

    >>> config_path("digits").name, config_path("mine.yaml").name
    ('digits.yaml', 'mine.yaml')
    """
    path = Path(name)
    ready = folder / f"{path}.yaml"
    is_name = re.fullmatch(r"\w+", str(name)) is not None
    return ready if is_name and not path.is_file() and ready.is_file() else path
