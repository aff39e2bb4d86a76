import re
from pathlib import Path
from typing import Any

import compoconf
import jax.numpy as jnp
import pytest
import yaml

from jax_trainer.optimizer import OptimizerInterface

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
FILES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
LAYER = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
PARAMS = {"encoder": {"embedding": jnp.ones(3), "layer": LAYER}, "head": LAYER}


@pytest.mark.parametrize("text", FILES, ids=lambda text: yaml.safe_load(text)["optimizer"]["class_name"])
def test_the_files_of_the_page_can_be_read_and_built(text):
    section = yaml.safe_load(text)["optimizer"]
    config: Any = compoconf.parse_config(OptimizerInterface.cfgtype, section)
    tx = config.instantiate(OptimizerInterface).build(5000)
    state = tx.init(PARAMS)
    tx.update(PARAMS, state, PARAMS)
