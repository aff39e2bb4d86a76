import re
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_trainer.config import load_config
from jax_trainer.config.settings import Settings
from jax_trainer.optimizer import OptimizerInterface
from jax_trainer.testing import assert_finite

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "optimizers.md").read_text()
FILES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
LAYER = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
PARAMS = {"encoder": {"embedding": jnp.ones(3), "layer": LAYER}, "head": LAYER}


@dataclass
class Page(Settings):
    optimizer: OptimizerInterface.cfgtype


@pytest.mark.parametrize("number", range(len(FILES)))
def test_the_files_of_the_page_can_be_read_and_built(number: int, tmp_path: Path):
    file = tmp_path / "page.yaml"
    file.write_text(FILES[number])
    tx = load_config(file, Page).value.optimizer.instantiate(OptimizerInterface).build(5000)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
    assert_finite(updates)
