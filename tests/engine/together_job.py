"""Processes that train together, of which one fails, or all end by time, as the command line says."""

import os
import signal
import sys
import time

import jax

from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader, Data
from jax_trainer.engine import EvalRoundEnd, Every, Plan, SavePoint, StepEnd, run
from jax_trainer.sharding import Layout, init_ddp_mesh, leave
from jax_trainer.sharding.group import ProcessFailedError
from jax_trainer.testing import linear_program, numbered_data

index, what = jax.process_index(), sys.argv[4]


def report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class CallbackList:
    """Injects a failure, and reports the steps of events."""

    saves_every = Every(minutes=0.01)

    def handle(self, event) -> None:
        match event:
            case StepEnd():
                time.sleep(0.01 + 0.01 * index)  # clocks and speeds differ
                if event.step == 20 and what == "fail" and index == 1:
                    raise OSError("the disk is gone")
                if event.step == 20 and what == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
            case EvalRoundEnd():
                report(f"evaluated {event.step}")
            case SavePoint() if event.due:
                report(f"saved {event.step} {type(event.reason).__name__}")


program = compile_program(linear_program(), layout=Layout(mesh=init_ddp_mesh()))
loader = ArrayLoader(numbered_data(1024), 32, shuffle=True)
state = program.init(jax.random.key(0), next(iter(loader)))
minutes = Every(minutes=0.02) if what == "time" else Every()
plan = Plan(max_epochs=100, max_time=8.0 if what == "time" else 60.0, eval_every=minutes)
began = time.monotonic()
try:
    last = run(program, state, Data(loader, {"val": loader}), plan, [CallbackList()])
    report(f"ended {int(last.step)}")
except (OSError, ProcessFailedError) as error:
    report(f"{type(error).__name__}: {error}")
    os._exit(3)  # JAX would wait for the others
except KeyboardInterrupt:
    report("Ctrl-C")
    leave()
    os._exit(0)
