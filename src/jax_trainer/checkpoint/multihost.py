"""How several processes save and restore one checkpoint: the lead (number 0) keeps the folder, everyone its own arrays.

All processes call the same methods of their stores in the same order. What one has done it says in an exchange, which
nobody leaves before all have spoken. So what goes wrong in one goes wrong in all, with the same words, and all go on,
try again or give up together. A process alone exchanges nothing.

A save, in the saving thread of every process, with an exchange after each of these (and one before, in which all tell
where their loaders stand, if these keep their own positions):

1. The lead makes a folder under a temporary name, and tells it. A process that has nothing to save, because it failed
   before (a wrong state, no memory for a snapshot), says so here.
2. Everyone writes its parts of the arrays into that folder. The lead also writes what all have whole: small arrays,
   and those on the host.
3. The lead puts the parts together, writes the record and the manifest, and renames the folder.
4. The lead deletes the checkpoints that need not stay.

Where something failed, nobody writes any more when the exchange is over, and the lead deletes its folder. All begin
again with 1 if every failure is one that may pass, and raise a `SaveError` that names the process otherwise.

A process that dies or hangs does not come to the next exchange. The others wait for their patience and raise a
`SaveError`. Before the lead has renamed the folder nothing counts as a checkpoint, and what is left of it is swept by
a later save. A lead that has renamed it, and then hears nothing, says in its error that the checkpoint is there.

To restore, the lead chooses a checkpoint whose digests are right and tells its path; everyone reads its parts and says
whether it could. What a folder holds is likewise looked at by the lead, when nothing is being saved, and told.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax

from jax_trainer.checkpoint.content import begin_shared, complete, write_shard
from jax_trainer.checkpoint.durable import write_atomically
from jax_trainer.checkpoint.failures import MultiHostError, errno_of, in_one_line, is_transient
from jax_trainer.checkpoint.json_codec import decoded, encoded
from jax_trainer.checkpoint.partial import partial_folder
from jax_trainer.checkpoint.record import CheckpointError, Record
from jax_trainer.datasets import Position, joined_states, own_state
from jax_trainer.processes import ProcessGroup, ProcessGroupError, process_group

Result = TypeVar("Result")
_SLOWEST = 50e6  # bytes in a second: the larger a checkpoint, the longer the others may take
_MOST_NAMED = 3


class HostBarrier:
    """What the processes of a job say to each other about the checkpoints in `folder`.

    Args:
        folder: the same in all processes.
        what: who talks; a thread needs an exchange of its own.
        patience: the seconds to wait for the others.
    """

    def __init__(self, folder: Path, what: str, patience: float) -> None:
        self._topic, self._patience = f"checkpoints/{str(folder).strip('/')}/{what}", patience

    @property
    def _us(self) -> ProcessGroup:
        return process_group() if jax.distributed.is_initialized() else ProcessGroup(0, 1)

    @property
    def is_multi_process(self) -> bool:
        """Whether there are others to talk to."""
        return self._us.is_multi_process

    @property
    def is_primary(self) -> bool:
        """Whether this process keeps the folder."""
        return self._us.is_primary

    def from_primary(self, say: Callable[[], str], size: int = 0) -> str:
        """What the lead's `say` returns, which nobody else calls. Where it fails, all raise a `MultiHostError`."""
        return self._exchanged(say if self.is_primary else str, size)

    def all_do(self, work: Callable[[], Result], size: int = 0) -> Result:
        """What `work` returned here, once it did in all. Where one fails, all raise the same `MultiHostError`.

        Args:
            work: what every process does.
            size: how many bytes there are to write or read, for which the others get more time.
        """
        results: list[Result] = []
        self._exchanged(lambda: results.append(work()) or "", size)
        return results[0]

    def ask_primary(self, say: Callable[[], str], size: int = 0) -> str:
        """Like `lead_says`, for the main thread: the lead raises its own error, the others a `CheckpointError`."""
        if not self.is_multi_process:
            return say()
        try:
            return self.from_primary(say, size)
        except MultiHostError as error:
            _raise_own(error)

    def tell_absence(self, error: Exception) -> None:
        """Says, in place of the first word of a save, that this process cannot take part. Raises nothing."""
        if self.is_multi_process:
            try:
                self._agree("", {"problem": in_one_line(error), "errno": None})
            except (MultiHostError, ProcessGroupError):
                return  # the error itself is about to be raised

    def all_gather(self, word: str) -> list[str]:
        """What every process says, in their order. Where one failed before, all raise the same `MultiHostError`."""
        return [answer["word"] for answer in self._answers(word, {})]

    def own_position(self, position: Position) -> Position:
        """`position` with the state that this process's own loader had."""
        return replace(position, state=own_state(position.state, self._us.index, self._us.count))

    def _exchanged(self, work: Callable[[], str], size: int) -> str:
        word, failure = "", None
        try:
            word = work()
        except Exception as error:
            failure = error
        problem = {} if failure is None else {"problem": in_one_line(failure), "errno": errno_of(failure)}
        try:
            return self._agree(word, problem, size)
        except MultiHostError as error:
            raise error from failure

    def _agree(self, word: str, problem: Mapping[str, Any], size: int = 0) -> str:
        return self._answers(word, problem, size)[0]["word"]

    def _answers(self, word: str, problem: Mapping[str, Any], size: int = 0) -> list[dict[str, Any]]:
        patience = self._patience + size / _SLOWEST
        said = self._us.all_gather(self._topic, json.dumps({"word": word, **problem}), patience=patience)
        answers = [json.loads(one) for one in said]
        failed = {index: answer for index, answer in enumerate(answers) if "problem" in answer}
        if failed:
            raise _failure_of(failed, len(answers))
        return answers


def _raise_own(error: MultiHostError) -> NoReturn:
    """Raises what went wrong in this process; where that was nothing, what went wrong in another."""
    raise error.__cause__ or CheckpointError(str(error)) from None


def _failure_of(failed: Mapping[int, Mapping[str, Any]], count: int) -> MultiHostError:
    lasting = [answer["errno"] for answer in failed.values() if not is_transient(answer["errno"])]
    first = next(iter(failed.values()))["errno"]
    named = [f"process {index} of {count}: {answer['problem']}" for index, answer in failed.items()]
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    return MultiHostError(lasting[0] if lasting else first, "; ".join(named[:_MOST_NAMED]) + more)


def with_all_positions(exchange: HostBarrier, record: Record) -> Record:
    """`record` with the positions of all processes, where their loaders keep their own."""
    if not exchange.is_multi_process or record.data_state is None:
        return record
    states = [decoded(json.loads(word)) for word in exchange.all_gather(json.dumps(record.data_state))]
    return replace(record, data_state=encoded(joined_states(states)))


def probe_all(exchange: HostBarrier, folder: Path, make_ready: Callable[[], None]) -> None:
    """Fails in all processes unless all of them can write to `folder`, and it is the same folder for all of them."""

    def begin() -> str:
        make_ready()
        return str(held.enter_context(partial_folder(folder)))

    def probe() -> None:
        _check_seen(Path(probed))
        write_atomically(Path(probed, "probe"), "x")

    with ExitStack() as held:
        probed = exchange.ask_primary(begin)
        try:
            exchange.all_do(probe)
        except MultiHostError as error:
            _raise_own(error)


def write_all(
    exchange: HostBarrier,
    path: Path,
    arrays: Mapping[str, Any],
    record: Callable[[], Record],
    make_ready: Callable[[], None],
    size: int,
) -> None:
    """The first three parts of a save: when this returns, the checkpoint of all processes is in `path`.

    Args:
        exchange: that of the saving threads.
        path: where the checkpoint will be; its name says the step.
        arrays: what `taken_share` gave this process.
        record: called by the lead when the arrays are written.
        make_ready: called by the lead at first.
        size: how many bytes all arrays have together.
    """

    def begin() -> str:
        make_ready()
        return json.dumps([path.name, str(held.enter_context(begin_shared(path.parent)))])

    def write() -> Any:
        if name != path.name:
            raise CheckpointError(f"It saves {path.name}, and the lead {name}: all must save the same step.")
        _check_seen(Path(place))
        return write_shard(Path(place), arrays, is_primary=exchange.is_primary)

    def finish() -> None:
        if exchange.is_primary:
            complete(Path(place), path, places, record, last_point="before_rename")
            done.append(path)

    done: list[Path] = []
    with ExitStack() as held:
        name, place = json.loads(exchange.from_primary(begin))
        places = exchange.all_do(write, size)
        with _saying_what_is_there(done):
            exchange.all_do(finish, size)


def garbage_collect_all(exchange: HostBarrier, path: Path, garbage_collect: Callable[[], str]) -> None:
    """The last part of a save, after the checkpoint is in `path`."""
    with _saying_what_is_there([path]):
        exchange.from_primary(garbage_collect)


@contextmanager
def _saying_what_is_there(done: list[Path]) -> Iterator[None]:
    try:
        yield
    except ProcessGroupError as error:
        if not done:
            raise
        raise ProcessGroupError(f"It is there and whole, but not all processes know of it. {error}") from error


def read_all(exchange: HostBarrier, choose: Callable[[], Path], read: Callable[[Path], Result], size: int) -> Result:
    """What `read` makes of the path that the lead chooses, once it did in all processes."""
    path = Path(exchange.ask_primary(lambda: str(choose()), size))
    try:
        return exchange.all_do(lambda: read(path), size)
    except MultiHostError as error:
        _raise_own(error)


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"It does not see {folder}, which the lead has just made: all processes must save to the same file system."
        )
