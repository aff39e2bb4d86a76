"""Processes on a Ray cluster: one actor each, which trains in its own worker process."""

import contextlib
import io
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, Any

from jax_trainer.config.stop_signals import handled
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.sharding import LOST, leave
from jax_trainer.tools.launching import RESUMABLE, SAVE_SECONDS, Attempt, Launch, LaunchError
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
    cpus = max(os.cpu_count() or 1, (launch.cpus_per_process or 1) * launch.processes)
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
        with _asked_to_stop() as asked:
            return _attempt(launch, command, actors, asked, resume=resume)
    finally:
        for actor in actors:
            _ray().kill(actor)
        _ray().util.remove_placement_group(group)


def run_independent(launch: Launch, command: Command) -> Attempt:
    """Starts an actor for each worker on the connected cluster, and waits for all; lost and late ones are restarted."""
    id = uuid.uuid4().hex

    def work(index: int) -> Attempt:
        left = launch.restarts
        while True:
            actor = _actor(launch, variables=launch.job_variables(f"{id}_{index}"))
            try:
                ended = _attempt(launch, command, [actor], asked, resume=False)
            finally:
                _ray().kill(actor)
            if asked or not left or ended.exit_codes[0] not in RESUMABLE:
                return ended
            left -= 1

    with _asked_to_stop() as asked, ThreadPoolExecutor(launch.workers) as pool:
        ended = [*pool.map(work, range(launch.workers))]
    # a trial that is stopped here is tried again, like that of a lost process
    codes = {0: 128 + asked[0]} if asked else {index: one.exit_codes[0] for index, one in enumerate(ended)}
    return Attempt(codes, reason=next((one.reason for one in ended if one.reason), ""))


def _attempt(launch: Launch, command: Command, actors: list[Any], asked: list[int], *, resume: bool) -> Attempt:
    """Runs the command in all actors until they end, are asked to stop, or their time is up."""
    ray, exit_codes, output, reason = _ray(), dict[int, int](), "", ""
    waiting = [actor.place.remote() for actor in actors]
    while not asked and len(ray.wait(waiting, num_returns=len(waiting), timeout=0.2)[0]) < len(waiting):
        pass
    if asked:
        return Attempt({0: 128 + asked[0]}, stopped_by=asked[0])
    try:
        places = ray.get(waiting)
    except ray.exceptions.RayActorError:
        return Attempt({0: LOST})
    coordinator, folder = f"{places[0]['host']}:{places[0]['port']}", os.getcwd()
    results = {
        actor.train.remote(command, launch.words(index, coordinator, resume=resume), folder): index
        for index, actor in enumerate(actors)
    }
    limit, deadline = time.monotonic() + (launch.time or float("inf")), float("inf")
    pending, timed_out, is_stopping = list(results), False, False
    while pending and time.monotonic() < deadline:
        if asked and launch.workers:
            break
        ended, pending = ray.wait(pending, timeout=0.2)
        for one in ended:
            try:
                code, text, errors = ray.get(one)
            except ray.exceptions.RayActorError:  # SIGTERM ends a process at once before it trains
                code = 128 + signal.SIGTERM if is_stopping else LOST
                return Attempt({results[one]: code} | exit_codes, "", timed_out, "", *asked)
            exit_codes[results[one]] = code
            output, reason = text if results[one] == 0 else output, reason or (errors.strip() if code else "")
            deadline = min(deadline, time.monotonic() + launch.heartbeat + GRACE_PERIOD)
        if not is_stopping and (asked or time.monotonic() > limit):
            is_stopping, timed_out = True, not asked
            deadline = min(deadline, time.monotonic() + SAVE_SECONDS)
            _stop(places, *asked or [signal.SIGTERM])
    exit_codes |= {results[one]: 128 + signal.SIGKILL for one in pending}  # by who has started the actors
    return Attempt(exit_codes, output.strip().rpartition("\n")[2], timed_out, reason, *asked)


def _actors(launch: Launch) -> tuple[Any, list[Any]]:
    """A placement group with a bundle for each node, and the actors in it."""
    ray = _ray()
    each = {
        "CPU": (launch.cpus_per_process or 1),
        "GPU": _gpus(launch),
        "memory": (launch.memory_per_process or 0) * 10**9,
    }
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
    options: dict[str, Any] = {"num_cpus": (launch.cpus_per_process or 1), "num_gpus": gpus, "max_restarts": 0}
    options |= {"memory": (launch.memory_per_process or 0) * 10**9 or None, "scheduling_strategy": scheduling}
    options["runtime_env"] = {"env_vars": {**variables, **({} if gpus else launch.cpu_variables())}}
    return _ray().remote(Process).options(**options).remote()


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


def _kill(pid: int, number: int) -> None:  # Ray takes no builtin
    os.kill(pid, number)


def _ray() -> Any:
    with from_extra("ray"):
        import ray  # pyright: ignore[reportMissingImports]
        import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]
    return ray
