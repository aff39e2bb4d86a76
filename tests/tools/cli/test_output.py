"""What is only shown never ends a training: a full or closed standard output or error, a reader who leaves."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tools.cli.cli_runs import PATIENCE, PROGRAM, process_environment, tiny_file

LAST = "step_00000008"
STREAMS = {
    "both full": ">/dev/full 2>/dev/full",
    "both closed": ">&- 2>&-",
    "nobody reads on": "2>&1 | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}",
}
SCRIPT = """
    import jax, logging, numpy as np, optax
    from flax import linen as nn
    from jax_trainer import EvalLoop, TrainLoop, TrainTask, fit

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x)

    x, y = np.ones((8, 3), np.float32), np.zeros(8, np.int32)
    loss = lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    result = fit(Net(), (x, y), loss_fn=loss, optimizer=optax.sgd(0.1), num_epochs=2, batch_size=4, log_dir="runs",
                 tensorboard=False)
    logging.getLogger("jax_trainer").warning("nobody reads this")
    net, data = Net(), [(x, y)] * 3
    loop = TrainLoop(net.init, TrainTask(apply=net.apply, optimizer=optax.sgd(0.1), loss=loss, data=data), n_steps=3)
    steps = [one.step for one in loop]
    open("done", "w").write(f"{int(result.state.step)} {steps}")
"""


def shell(command: str, folder: Path) -> int:
    given = ["bash", "-c", command]
    return subprocess.run(given, cwd=folder, env=process_environment(), timeout=PATIENCE).returncode


@pytest.mark.slow
@pytest.mark.parametrize("streams", STREAMS)
def test_a_training_whose_output_cannot_be_written_is_completed(tmp_path, streams):
    command = f"{' '.join(PROGRAM)} train {tiny_file(tmp_path)} {STREAMS[streams]}"
    assert shell(command, tmp_path) == 0
    [run] = (tmp_path / "runs").glob("*/*")
    assert (run / "checkpoints" / LAST).is_dir()
    assert "Run completed" in (run / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["both full", "both closed"])
def test_a_script_whose_output_cannot_be_written_trains_to_its_end(tmp_path, streams):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    assert shell(f"{sys.executable} script.py {STREAMS[streams]}", tmp_path) == 0
    assert (tmp_path / "done").read_text() == "4 [1, 2, 3]"


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_a_failure_of_a_command_that_only_shows(tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(PROGRAM)} describe AdamW >/dev/full"],
        cwd=tmp_path,
        env=process_environment(),
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "No space left on device" in done.stderr) == (1, True)
