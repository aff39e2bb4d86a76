"""The one-line message after Ctrl-C: the step reached, and how to resume."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import checkpoint_infos
from jax_trainer.checkpoint.ranking import newest_first
from jax_trainer.engine import is_by_ctrl_c
from jax_trainer.engine.events import by_ctrl_c
from jax_trainer.engine.processes import peers


@contextmanager
def before_first_step() -> Iterator[None]:
    """Reports a Ctrl-C during the setup of a run (tracing, compiling, initialisation) in one line."""
    try:
        yield
    except KeyboardInterrupt as end:
        if is_by_ctrl_c(end):
            raise
        raise by_ctrl_c("Interrupted before the first step. Nothing was saved.") from None


def resumable_step(folder: RunFolder) -> int | None:
    """The step of the latest checkpoint that can be resumed, ignoring damaged ones; None if there is none."""
    # without the other processes, which may have ended
    intact = [one for one in checkpoint_infos(folder.checkpoints) if not one.problem]
    return next((one.step for one in newest_first(intact, ("opt_state",))), None)


def with_result(
    end: KeyboardInterrupt | SystemExit, run: Any, result: Callable[[Any], Any]
) -> KeyboardInterrupt | SystemExit:
    """`end` with the `result` of the `Run` so far; for Ctrl-C, the message has the call that resumes it.

    Before the first step and without a folder, `end` itself.
    """
    recording, target = run.spec.recording, run.target
    if recording is None or target is None or not run.has_started:
        return end
    if peers().is_multi_process:
        run.kept_best = None  # the store would wait for the others
    reached = result(run) if run.has_state else None
    if isinstance(end, KeyboardInterrupt):
        if not is_by_ctrl_c(end):
            return end
        step, call = resumable_step(target.folder), recording.resume_call.format(repr(str(target.folder.path)))
        how = "Nothing was saved." if step is None else f"Resume from step {step} with `{call}`."
        end.args = (f"{end} {how} The partial result is the `result` of this KeyboardInterrupt.",)
        end.__traceback__ = None  # no error in the library
    end.result = reached  # type: ignore[union-attr]  # exceptions take any attribute
    return end
