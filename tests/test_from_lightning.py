"""The page for users of Lightning has a row for everything that they may have used."""

import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "from-lightning.md"


def rows(title: str) -> set[str]:
    """The names in the first column of the table below `title`."""
    table = PAGE.read_text().split(title)[1].split("\n\n")[1]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}


@pytest.mark.integration
def test_every_flag_and_callback_of_lightning_has_a_row():
    lightning = pytest.importorskip("lightning", reason="`make integrations` installs Lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    flags = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    assert flags - rows("Every flag of Lightning 2.6:") == set()
    assert set(callbacks.__all__) - rows("Every callback of Lightning 2.6:") == set()
