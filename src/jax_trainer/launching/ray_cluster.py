"""Processes on a Ray cluster: one actor each, which trains in its own worker process."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax_trainer.launching.job import Attempt, Launch, LaunchError
from jax_trainer.launching.local import GRACE_PERIOD, free_port
from jax_trainer.multihost import LOST, leave
from jax_trainer.optional_import import from_extra

_ROOM = 120.0  # seconds to wait for free resources
Command = Callable[[list[str]], int]  # the command line: from arguments to an exit code


class Process:
    """One process of a launch, as an actor."""

    def place(self) -> dict[str, Any]:
        """Where it runs: address, a free port, process id and node."""
        node = _ray().get_runtime_context().get_node_id()
        return {"host": _ray().util.get_node_ip_address(), "port": free_port(), "pid": os.getpid(), "node": node}

    def train(self, command: Command, words: list[str], folder: str) -> tuple[int, str]:
        """Runs `command` in `folder`; its exit code, and its standard output with `--json`."""
        os.chdir(folder)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler ends the worker
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured) if "--json" in words else contextlib.nullcontext():
            code = command(words)
        leave(2.0 if code else 15.0)
        return code, captured.getvalue()


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
        with _forward_signals(places):
            return _wait(launch, results)
    finally:
        for actor in actors:
            _ray().kill(actor)
        _ray().util.remove_placement_group(group)


def _wait(launch: Launch, results: dict[Any, int]) -> Attempt:
    ray = _ray()
    pending, exit_codes, output = list(results), dict[int, int](), ""
    limit, deadline = time.monotonic() + (launch.time or float("inf")), float("inf")
    timed_out = False
    while pending and time.monotonic() < deadline:
        ended, pending = ray.wait(pending, timeout=0.2)
        for one in ended:
            try:
                code, text = ray.get(one)
            except ray.exceptions.RayActorError:
                return Attempt({results[one]: LOST} | exit_codes)
            exit_codes[results[one]] = code
            output = text if results[one] == 0 else output
            deadline = min(deadline, time.monotonic() + launch.heartbeat + GRACE_PERIOD)
        if not timed_out and time.monotonic() > limit:
            timed_out = True
            signal.raise_signal(signal.SIGTERM)  # forwarded to all
    exit_codes |= {results[one]: LOST for one in pending}
    return Attempt(exit_codes, output.strip().rpartition("\n")[2], timed_out)


def _actors(launch: Launch) -> tuple[Any, list[Any]]:
    """A placement group with a bundle for each node, and the actors in it."""
    ray = _ray()
    gpus = _gpus(launch)
    each = {"CPU": _cpus(launch), **({"GPU": gpus} if gpus else {})}
    memory = (launch.memory_per_process or 0) * 10**9
    bundle = {name: amount * launch.processes_per_node for name, amount in each.items()}
    bundle |= {"memory": memory * launch.processes_per_node} if memory else {}
    strategy = "STRICT_SPREAD" if launch.nodes > 1 else "STRICT_PACK"
    group = ray.util.placement_group([bundle] * launch.nodes, strategy=strategy)
    if not group.wait(_ROOM):
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"The Ray cluster has no room for {launch.nodes} x {bundle} after {_ROOM:.0f} seconds. It has "
            f"{ray.cluster_resources()}, of which {ray.available_resources()} are free."
        )
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    variables = {} if gpus else launch.cpu_variables()
    actors = [
        ray.remote(Process)
        .options(
            num_cpus=each["CPU"],
            num_gpus=gpus,
            memory=memory or None,
            max_restarts=0,
            runtime_env={"env_vars": variables},
            scheduling_strategy=scheduling(group, placement_group_bundle_index=index // launch.processes_per_node),
        )
        .remote()
        for index in range(launch.processes)
    ]
    return group, actors


def _cpus(launch: Launch) -> int:
    return launch.cpus_per_process or 1


def _gpus(launch: Launch) -> int:
    """GPUs of a process: as asked, or those of the cluster split evenly; 0: it trains on CPU devices."""
    there = int(_ray().cluster_resources().get("GPU", 0))
    if launch.platform == "cpu" or (launch.platform is None and not there):
        return 0
    return launch.devices_per_process or max(1, there // launch.processes)


@contextmanager
def _forward_signals(places: list[dict[str, Any]]) -> Iterator[None]:
    """Forwards the first SIGINT or SIGTERM to all processes, wherever they are; a second one ends this process."""
    ray = _ray()

    def handle(number: int, frame: Any) -> None:
        for other, handler in before.items():
            signal.signal(other, handler)
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for place in places:
            there = affinity(place["node"], soft=False)
            ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=there).remote(place["pid"], signal.SIGTERM)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ray() -> Any:
    with from_extra("ray"):
        import ray
        import ray.util.scheduling_strategies
    return ray
