"""One of two processes that train together; the second receives a signal."""

import os
import sys
import time

import jax

index, port, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)

import jax_trainer.sharding  # noqa: E402, F401 - lets the loops work together
from jax_trainer.core import compile_program  # noqa: E402 - JAX has to know of the other process first
from jax_trainer.datasets import ArrayLoader, Data  # noqa: E402
from jax_trainer.engine import Plan, SavePoint, StepEnd, run  # noqa: E402
from jax_trainer.sharding import Layout  # noqa: E402
from jax_trainer.testing import numbered_data, tiny_program  # noqa: E402


class PreemptedObserver:
    """Gets the notice at step 20, and writes down where it could save."""

    def handle(self, event) -> None:
        if isinstance(event, StepEnd):
            time.sleep(0.01)
            if event.step == 20 and index == 1:
                os.kill(os.getpid(), number)
        if isinstance(event, SavePoint) and event.reason is not None:
            sys.stdout.write(f"saved at {event.step}\n")
            sys.stdout.flush()


mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=[jax.devices()[0], jax.devices()[-1]])
program = compile_program(tiny_program("linen"), layout=Layout(mesh=mesh))
loader = ArrayLoader(numbered_data(1024), 32, shuffle=True, process=(0, 1))  # both have all of it
state = program.init(jax.random.key(0), next(iter(loader)))
try:
    run(program, state, Data(loader), Plan(max_epochs=100), [PreemptedObserver()])
except SystemExit as end:
    sys.stdout.flush()
    os._exit(int(end.code or 0))
