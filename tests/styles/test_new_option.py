"""An option is one leaf and one wrapper: with them every style, files, the command line, help and schema have it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax_trainer

LEAF = """        probe: the weights are multiplied by it after every step.
    \"\"\"

    probe: float = 1.0
    precision:"""
WRAPPER = """
    if options.probe != 1.0:
        inner, scaled = program.train_step, lambda state: state.replace(params=_times(state.params, options.probe))
        program = program._replace(train_step=lambda *given: (lambda new, *more: (scaled(new), *more))(*inner(*given)))
    return compile_program("""
HELPER = """

def _times(params, factor):
    return __import__("jax").tree.map(lambda leaf: leaf * factor, params)
"""
TRIAL = """
import json
import jax, numpy as np, optax
from flax import nnx
from jax_trainer import TrainLoop, TrainTask, fit, train_fn
from jax_trainer.config import config_from
from jax_trainer.config.describing import json_schema, keys_of
from jax_trainer.tools.cli import main
from jax_trainer.trainer import TrainerConfig, TrainerModule

x, ends = np.ones((2, 2), np.float32), {}
loss = lambda outputs, targets: ((outputs - targets) ** 2).mean()
tx, option = optax.sgd(0.0), {"probe": 3.0}
made = lambda: nnx.Linear(2, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
weight = lambda state: float(jax.tree.leaves(state.params)[-1].max())

run = {"num_epochs": 1, "progress": False, "tensorboard": False, "save": False}
ends["fit"] = weight(fit(made(), [(x, x)], loss_fn=loss, optimizer=tx, **run, **option).state)

class Own(TrainerModule):
    def batch_to_input(self, batch):
        return batch[0]

    def loss_function(self, model, batch, train=True):
        return loss(model(batch[0]), batch[1]), {}

config = config_from({"train_epochs": 1, "enable_progress_bar": False, **option}, TrainerConfig)  # as in a file
by_keywords = {"train_epochs": 1, "enable_progress_bar": False, **option}
for name, given in {"TrainerModule": by_keywords, "file": {"config": config}}.items():
    trainer = Own(model=made(), optimizer=tx, exmp_input=(x, x), **given)
    trainer.train_model([(x, x)])
    ends[name] = weight(trainer.state)

step = lambda model, rng_key, batch: nnx.value_and_grad(lambda model: loss(model(batch[0]), batch[1]))(model)
model = made()
train = train_fn(fns=(step, step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1, progress=False, **option)
train(jax.random.key(0), model, nnx.Optimizer(model, tx, wrt=nnx.Param), [(x, x)], None)
ends["train_fn"] = float(model.kernel[...].max())

task = TrainTask(apply=lambda variables, x: x @ variables["params"], optimizer=tx, loss=loss, data=[(x, x)])
(last,) = TrainLoop(lambda rngs, x: {"params": x}, task, n_steps=1, stdout=False, **option)
ends["TrainLoop"] = float(last.model_params.max())

helps = {key.name: key.help for key in keys_of(TrainerConfig)}
ends["describe"], ends["schema"] = helps["probe"], "probe" in json.dumps(json_schema(TrainerConfig))
ends["command"] = main(["check", "digits", "trainer.probe=2.0"])
print(json.dumps(ends))
"""


def test_one_leaf_and_one_wrapper_add_an_option_to_every_style_files_the_command_line_help_and_schema(tmp_path: Path):
    package = tmp_path / "jax_trainer"
    shutil.copytree(Path(jax_trainer.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    leaf, wrapper = package / "runs" / "options.py", package / "runs" / "assembling.py"
    before = leaf.read_text(), wrapper.read_text()
    leaf.write_text(before[0].replace('    """\n\n    precision:', LEAF, 1))
    wrapper.write_text(before[1].replace("\n    return compile_program(", WRAPPER, 1) + HELPER)
    assert before[0] != leaf.read_text() and before[1] + HELPER != wrapper.read_text()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRIAL]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert "multiplied" in found.pop("describe") and found.pop("schema") and not found.pop("command")
    assert found == dict.fromkeys(["fit", "TrainerModule", "file", "train_fn", "TrainLoop"], 3.0)
