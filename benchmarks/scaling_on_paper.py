"""What a training job on many GPUs needs in a step, computed from sizes and rates: nothing here is measured.

    python benchmarks/scaling_on_paper.py [texts_per_gpu=16] [network=25e9] …

Every assumption is a field of `Job`, and can be given another value by its name.
"""

import sys
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

say = Console(highlight=False, markup=False, soft_wrap=True).print


class Job(NamedTuple):
    """GPT-2 with 1.5 billion parameters on 256 GPUs, and all that is assumed about them."""

    nodes: int = 32
    gpus: int = 8  # of a node
    layers: int = 48
    width: int = 1600
    vocabulary: int = 50257
    context: int = 1024
    texts_per_gpu: int = 8
    compute_bytes: int = 2  # of a number in the model: bf16
    state_bytes: int = 4  # of a weight and of each of its moments: f32
    gradient_bytes: int = 4  # of a gradient that is reduced
    moments: int = 2  # Adam
    gathers: int = 2  # of the weights: forwards and backwards; 1 where they are kept in between
    activations: int = 34  # bytes for a token, a layer and a unit of width, without rematerialisation, attention fused
    peak: float = 989e12  # operations a second, dense bf16: H100 and H200
    share: float = 0.45  # of it that the model reaches
    nvlink: float = 450e9  # bytes a second that a GPU sends within its node
    network: float = 50e9  # and to other nodes: 400 Gbit/s for every GPU
    disk: float = 2e9  # bytes a second that a node writes
    host: float = 25e9  # bytes a second from a GPU to its host
    token_bytes: int = 4  # as fed: int32

    @property
    def devices(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus

    @property
    def parameters(self) -> int:
        """Weights, biases and norms of GPT-2, whose head is its embedding."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.context + 2) * self.width

    @property
    def tokens(self) -> int:
        """That a GPU sees in a step."""
        return self.texts_per_gpu * self.context

    @property
    def flops(self) -> float:
        """Operations of a GPU in a step: 6 for every weight of a matrix and token, and attention without a mask."""
        matrices = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        return self.tokens * (6.0 * matrices + 12 * self.layers * self.width * self.context)

    @property
    def compute(self) -> float:
        """Seconds."""
        return self.flops / (self.peak * self.share)

    @property
    def state(self) -> int:
        """Bytes of weights and moments: what a checkpoint holds."""
        return self.parameters * self.state_bytes * (1 + self.moments)


class Traffic(NamedTuple):
    """Bytes that a GPU sends in a step."""

    nvlink: float = 0.0
    network: float = 0.0

    def plus(self, other: "Traffic") -> "Traffic":
        """Both."""
        return Traffic(self.nvlink + other.nvlink, self.network + other.network)

    def times(self, factor: float) -> "Traffic":
        """So many of it."""
        return Traffic(self.nvlink * factor, self.network * factor)

    def seconds(self, job: Job) -> float:
        """If one follows the other; they use different wires, so it may take less."""
        return self.nvlink / job.nvlink + self.network / job.network


class Needs(NamedTuple):
    """What a step needs on every GPU, under one mesh."""

    data: int
    fsdp: int
    state: float  # bytes; weights and moments
    memory: float  # bytes; with gradients, the weights as they compute, and what is kept for the backward pass
    gathering: Traffic
    reducing: Traffic
    compute: float  # seconds
    gathering_seconds: float
    reducing_seconds: float
    gathers: int
    layers: int

    @property
    def exposed(self) -> float:
        """Seconds of communication that cannot run beside computing, a third of which is the forward pass.

        The first gathering runs beside the forward pass, the rest beside the backward pass, but for that of one layer:
        the first one has nothing to run beside, and neither have the last gradients.
        """
        forward, backward = self.compute / 3, self.compute * 2 / 3
        first = self.gathering_seconds / self.gathers
        rest = self.gathering_seconds - first + self.reducing_seconds
        hidden = min(first, forward) + min(rest, backward)
        return max(first + rest - hidden, (first + rest) / self.layers)

    @property
    def efficiency(self) -> tuple[float, float]:
        """The share of a step that computes: if nothing runs beside it, and if all does that can."""
        talking = self.gathering_seconds + self.reducing_seconds
        return self.compute / (self.compute + talking), self.compute / (self.compute + self.exposed)


def gather(payload: float, inside: int, across: int) -> Traffic:
    """A ring of `inside` GPUs in each of `across` nodes gathers (or reduces and scatters) so many bytes.

    What must enter a node comes in through all its members, each with its share, and is passed on by NVLink.
    """
    network = payload * (across - 1) / across / inside
    return Traffic(payload * (inside - 1) / inside, network)


def needs(job: Job, *, data: int, fsdp: int) -> Needs:
    """Of a mesh whose `fsdp` axis has neighbours, first in the same node."""
    if data * fsdp != job.devices:
        raise ValueError(f"data {data} × fsdp {fsdp} must be the {job.devices} GPUs of the job.")
    shard_inside, shard_across = min(fsdp, job.gpus), max(1, fsdp // job.gpus)
    copy_inside = max(1, job.gpus // fsdp)
    weights, gradients = job.parameters * job.compute_bytes, job.parameters * job.gradient_bytes
    gathering = gather(weights, shard_inside, shard_across).times(job.gathers)
    scattered = gather(gradients, shard_inside, shard_across)
    reducing = scattered.plus(gather(gradients / fsdp, copy_inside, data // copy_inside).times(2))
    # two layers at a time where they are gathered again, else all of them
    gathered = weights if fsdp == 1 or job.gathers == 1 else 2 * weights / job.layers
    kept = job.tokens * (job.layers * job.activations * job.width + 2 * 4 * job.vocabulary)  # logits and their slopes
    return Needs(
        data=data,
        fsdp=fsdp,
        state=job.state / fsdp,
        memory=job.state / fsdp + gradients / fsdp + gathered + kept,
        gathering=gathering,
        reducing=reducing,
        compute=job.compute,
        gathering_seconds=gathering.seconds(job),
        reducing_seconds=reducing.seconds(job),
        gathers=job.gathers,
        layers=job.layers,
    )


def input_rate(job: Job, seconds: float) -> float:
    """Bytes of tokens and targets that a node reads in a second, where a step takes so many."""
    return job.gpus * job.tokens * 2 * job.token_bytes / seconds


def checkpoint_seconds(job: Job, fsdp: int) -> tuple[float, float, float]:
    """From the GPU to its host, then to the disk: if every node writes its share, and if one writes it all."""
    return job.state / fsdp / job.host, job.state / job.nodes / job.disk, job.state / job.disk


def meshes(job: Job) -> list[tuple[int, int]]:
    """Data-parallel, sharded within a node, sharded over all: (data, fsdp)."""
    return [(job.devices, 1), (job.nodes, job.gpus), (1, job.devices)]


def table(job: Job) -> Table:
    """A line for every mesh."""
    made = Table(
        "mesh",
        "state",
        "memory",
        "NVLink",
        "network",
        "computing",
        "gathering",
        "reducing",
        "computes, at least, at most",
    )
    for data, fsdp in meshes(job):
        found = needs(job, data=data, fsdp=fsdp)
        total = found.gathering.plus(found.reducing)
        low, high = found.efficiency
        made.add_row(
            f"{{data: {data}, fsdp: {fsdp}}}",
            *(f"{size / 1e9:.2f} GB" for size in (found.state, found.memory, total.nvlink, total.network)),
            *(f"{1000 * t:.0f} ms" for t in (found.compute, found.gathering_seconds, found.reducing_seconds)),
            f"{low:.0%}, {high:.0%}",
        )
    return made


def report(job: Job) -> None:
    """Prints all tables."""
    say(f"{job.parameters:,} parameters, {job.devices} GPUs, {job.texts_per_gpu} texts of {job.context} on each:")
    slow, fast = (1000 * job._replace(share=share).compute for share in (0.4, 0.5))
    say(f"{job.devices * job.tokens:,} tokens and {job.devices * job.flops:.3g} operations a step, ", end="")
    say(f"{slow:.0f} ms at 40 % of the peak, {fast:.0f} ms at 50 %")
    say(table(job))
    fetch, shared, alone = checkpoint_seconds(job, job.gpus)
    say(
        f"input {input_rate(job, job.compute) / 1e6:.2f} MB/s for a node; checkpoint {job.state / 1e9:.1f} GB, ", end=""
    )
    say(f"{fetch:.2f} s to the hosts, {shared:.2f} s to the disk by all nodes, {alone:.1f} s by one")


def main() -> None:
    given = dict(entry.split("=", 1) for entry in sys.argv[1:])
    unknown = sorted(set(given) - set(Job._fields))
    if unknown:
        sys.exit(f"No such field: {', '.join(unknown)}. There are {', '.join(Job._fields)}.")
    report(Job(**{name: type(Job._field_defaults[name])(float(value)) for name, value in given.items()}))


if __name__ == "__main__":
    main()
