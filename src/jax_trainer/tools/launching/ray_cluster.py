"""Processes on a Ray cluster: one actor each, which trains in its own worker process."""

import contextlib
import io
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from jax_trainer.config.stop_signals import handled
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.sharding import LOST, leave
from jax_trainer.tools.launching.job import RESUMABLE, SAVE_SECONDS, Attempt, Launch, LaunchError
from jax_trainer.tools.launching.local import GRACE_PERIOD, free_port

_ROOM = 120.0  # seconds to wait for free resources
_REASON = 2000  # characters of the errors of a process
Command = Callable[[list[str]], int]  # the command line: from arguments to an exit code


class Process:
    """One process of a launch, as an actor."""

    def place(self) -> dict[str, Any]:
        """Where it runs: address, a free port, process id and node."""
        node = _ray().get_runtime_context().get_node_id()
        return {"host": _ray().util.get_node_ip_address(), "port": free_port(), "pid": os.getpid(), "node": node}

    def train(self, command: Command, words: list[str], folder: str) -> tuple[int, str, str]:
        """Runs `command` in `folder`: its exit code, its standard output with `--json`, and the end of its errors."""
        os.chdir(folder)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler ends the worker
        captured, errors = io.StringIO(), _Copied(sys.stderr)
        stdout = contextlib.redirect_stdout(captured) if "--json" in words else contextlib.nullcontext()
        with stdout, contextlib.redirect_stderr(errors):
            code = command(words)
        leave(2.0 if code else 15.0)
        return code, captured.getvalue(), errors.getvalue()[-_REASON:]


class _Copied(io.StringIO):
    """A stream that keeps what it passes on: Ray forwards lines with a delay, and not those of the last moment."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def cluster(address: str | None, launch: Launch) -> Iterator[None]:
    """A connection to the cluster at `address`; None: one on this machine, which ends with the connection."""
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what we start reports to nobody
    ray = _ray()
    cpus = max(os.cpu_count() or 1, _cpus(launch) * launch.processes)
    own = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address or "local", log_to_driver=True, **own)
    except (ConnectionError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(f"The Ray cluster at {address} cannot be reached: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()


def run(launch: Launch, command: Command, *, resume: bool) -> Attempt:
    """Starts an actor for each process on the connected cluster, and waits for them.

    A lost actor ends the attempt at once: JAX cannot continue without it, and waiting for the heartbeat costs time.
    """
    group, actors = _actors(launch)
    try:
        places = _ray().get([actor.place.remote() for actor in actors])
        coordinator = f"{places[0]['host']}:{places[0]['port']}"
        results = {
            actor.train.remote(command, launch.words(index, coordinator, resume=resume), os.getcwd()): index
            for index, actor in enumerate(actors)
        }
        with _asked_to_stop() as asked:
            return _wait(launch, results, places, asked)
    finally:
        for actor in actors:
            _ray().kill(actor)
        _ray().util.remove_placement_group(group)


def _wait(launch: Launch, results: dict[Any, int], places: list[dict[str, Any]], asked: list[int]) -> Attempt:
    ray = _ray()
    pending, exit_codes, output, reason = list(results), dict[int, int](), "", ""
    limit, deadline = time.monotonic() + (launch.time or float("inf")), float("inf")
    timed_out = is_stopping = False
    while pending and time.monotonic() < deadline:
        ended, pending = ray.wait(pending, timeout=0.2)
        for one in ended:
            try:
                code, text, errors = ray.get(one)
            except ray.exceptions.RayActorError:
                return Attempt({results[one]: LOST} | exit_codes)
            exit_codes[results[one]] = code
            output, reason = text if results[one] == 0 else output, reason or (errors.strip() if code else "")
            deadline = min(deadline, time.monotonic() + launch.heartbeat + GRACE_PERIOD)
        if not is_stopping and (asked or time.monotonic() > limit):
            is_stopping, timed_out = True, not asked
            deadline = min(deadline, time.monotonic() + SAVE_SECONDS)
            _stop(places, *asked or [signal.SIGTERM])
    exit_codes |= {results[one]: 128 + signal.SIGKILL for one in pending}  # which `run` does
    return Attempt(exit_codes, output.strip().rpartition("\n")[2], timed_out, reason, *asked)


class _Worker:
    """One start of an independent process, which is stopped at its time limit."""

    def __init__(self, launch: Launch, index: int, command: Command, id: str) -> None:
        self.index, self._time = index, launch.time or float("inf")
        self.actor = _actor(launch, variables=launch.job_variables(f"{id}_{index}"))
        self._place, self._began, self._is_stopped = self.actor.place.remote(), float("inf"), False
        self.result = self.actor.train.remote(command, launch.words(resume=False), os.getcwd())

    def stop_if_late(self) -> None:
        """Sends SIGTERM once, if the time since its start is over, and kills it `SAVE_SECONDS` later."""
        if self._began == float("inf") and _ray().wait([self._place], timeout=0)[0]:
            self._began = time.monotonic()
        late = time.monotonic() - self._began - self._time
        if not self._is_stopped and late > 0:
            self._is_stopped = True
            _stop([_ray().get(self._place)], signal.SIGTERM)
        elif late > SAVE_SECONDS:
            _ray().kill(self.actor)

    def end(self) -> tuple[int, str]:
        """The exit code of the process, which has ended, and the end of its errors."""
        try:
            code, _, errors = _ray().get(self.result)
        except _ray().exceptions.RayActorError:  # SIGTERM ends a process at once while it prepares a trial
            return 128 + signal.SIGTERM if self._is_stopped else LOST, ""
        _ray().kill(self.actor)
        return code, errors


def run_independent(launch: Launch, command: Command) -> Attempt:
    """Starts an actor for each worker on the connected cluster, and waits for all; lost and late ones are restarted."""
    ray = _ray()
    id, left, exit_codes, reason = uuid.uuid4().hex, [launch.restarts] * launch.workers, dict[int, int](), ""
    workers = [_Worker(launch, index, command, id) for index in range(launch.workers)]
    running = {worker.result: worker for worker in workers}
    try:
        with _asked_to_stop() as asked:
            while running and not asked:
                for one in ray.wait(list(running), timeout=0.2)[0]:
                    worker = running.pop(one)
                    code, errors = worker.end()
                    if code in RESUMABLE and left[worker.index]:
                        left[worker.index] -= 1
                        worker = _Worker(launch, worker.index, command, id)
                        running[worker.result] = worker
                    else:
                        exit_codes[worker.index], reason = code, reason or (errors.strip() if code else "")
                for worker in running.values():
                    worker.stop_if_late()
        # a trial that is stopped here is tried again, like that of a lost process
        return Attempt({0: 128 + asked[0]} if asked else exit_codes, reason=reason)
    finally:
        for worker in running.values():
            ray.kill(worker.actor)


def _actors(launch: Launch) -> tuple[Any, list[Any]]:
    """A placement group with a bundle for each node, and the actors in it."""
    ray = _ray()
    each = {"CPU": _cpus(launch), "GPU": _gpus(launch), "memory": (launch.memory_per_process or 0) * 10**9}
    bundle = {name: amount * launch.processes_per_node for name, amount in each.items() if amount}
    strategy = "STRICT_SPREAD" if launch.nodes > 1 else "STRICT_PACK"
    group = ray.util.placement_group([bundle] * launch.nodes, strategy=strategy)
    if not group.wait(_ROOM):
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"The Ray cluster has no room for {launch.nodes} x {bundle} after {_ROOM:.0f} seconds. It has "
            f"{ray.cluster_resources()}, of which {ray.available_resources()} are free."
        )
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    bundles = (index // launch.processes_per_node for index in range(launch.processes))
    return group, [_actor(launch, scheduling(group, placement_group_bundle_index=one)) for one in bundles]


def _actor(launch: Launch, scheduling: Any = "SPREAD", variables: Mapping[str, str] = {}) -> Any:
    gpus = _gpus(launch)
    options = (
        _ray()
        .remote(Process)
        .options(
            num_cpus=_cpus(launch),
            num_gpus=gpus,
            memory=(launch.memory_per_process or 0) * 10**9 or None,
            max_restarts=0,
            runtime_env={"env_vars": {**variables, **({} if gpus else launch.cpu_variables())}},
            scheduling_strategy=scheduling,
        )
    )
    return options.remote()


def _cpus(launch: Launch) -> int:
    return launch.cpus_per_process or 1


def _gpus(launch: Launch) -> int:
    """GPUs of a process: as asked, or those of the cluster split evenly; 0: it trains on CPU devices."""
    there = int(_ray().cluster_resources().get("GPU", 0))
    if launch.platform == "cpu" or (launch.platform is None and not there):
        return 0
    return launch.devices_per_process or max(1, there // launch.processes)


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """The first signal to this process that stops a training, once there is one; a second one has its usual effect."""
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        seen.append(number)
        for other, handler in before.items():
            signal.signal(other, handler)

    with handled(handle) as before:
        yield seen


def _stop(places: list[dict[str, Any]], number: int) -> None:
    """Sends a signal to all processes, wherever they are: all stop at the same step."""
    ray = _ray()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    for place in places:
        there = affinity(place["node"], soft=False)
        ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(place["pid"], number)


def _kill(pid: int, number: int) -> None:
    os.kill(pid, number)


def _ray() -> Any:
    with from_extra("ray"):
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]
    return ray
