"""An analytical cost model of a training step on many GPUs, from sizes and rates; nothing is measured.

    python benchmarks/scaling_cost_model.py [texts_per_gpu=16] [network=25e9] …

Every assumption is a field of `Job`, and can be set by name.
"""

import sys
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

echo = Console(highlight=False, markup=False, soft_wrap=True).print


class Job(NamedTuple):
    """GPT-2 with 1.5 billion parameters on 256 GPUs, and all assumptions about them."""

    nodes: int = 32
    gpus: int = 8  # per node
    layers: int = 48
    width: int = 1600
    vocabulary: int = 50257
    context: int = 1024
    texts_per_gpu: int = 8
    compute_bytes: int = 2  # per number in the model: bf16
    state_bytes: int = 4  # per weight and per moment: f32
    gradient_bytes: int = 4  # per reduced gradient
    moments: int = 2  # Adam
    gathers: int = 2  # of the weights: forward and backward pass; 1 if they are kept in between
    activations: int = 34  # bytes per token, layer and unit of width, without rematerialization, fused attention
    peak: float = 989e12  # FLOP/s, dense bf16: H100 and H200
    share: float = 0.45  # of the peak that the model reaches (MFU)
    nvlink: float = 450e9  # bytes/s that a GPU sends within its node
    network: float = 50e9  # bytes/s to other nodes: 400 Gbit/s per GPU
    disk: float = 2e9  # bytes/s that a node writes
    host: float = 25e9  # bytes/s from a GPU to its host
    token_bytes: int = 4  # of the input: int32

    @property
    def devices(self) -> int:
        """The number of GPUs."""
        return self.nodes * self.gpus

    @property
    def parameters(self) -> int:
        """Weights, biases and norms of GPT-2 with tied embeddings."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.context + 2) * self.width

    @property
    def tokens(self) -> int:
        """Tokens per GPU and step."""
        return self.texts_per_gpu * self.context

    @property
    def flops(self) -> float:
        """FLOPs per GPU and step: 6 per matrix weight and token, and unmasked attention."""
        matrices = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        return self.tokens * (6.0 * matrices + 12 * self.layers * self.width * self.context)

    @property
    def compute(self) -> float:
        """Seconds of computation per step."""
        return self.flops / (self.peak * self.share)

    @property
    def state(self) -> int:
        """Bytes of weights and moments: the size of a checkpoint."""
        return self.parameters * self.state_bytes * (1 + self.moments)


class Traffic(NamedTuple):
    """Bytes that a GPU sends in a step."""

    nvlink: float = 0.0
    network: float = 0.0

    def plus(self, other: "Traffic") -> "Traffic":
        """The sum."""
        return Traffic(self.nvlink + other.nvlink, self.network + other.network)

    def times(self, factor: float) -> "Traffic":
        """Scaled by `factor`."""
        return Traffic(self.nvlink * factor, self.network * factor)

    def seconds(self, job: Job) -> float:
        """Seconds, one after the other; an upper bound, because they use different links."""
        return self.nvlink / job.nvlink + self.network / job.network


class Needs(NamedTuple):
    """The cost of a step per GPU, for one mesh."""

    data: int
    fsdp: int
    state: float  # bytes; weights and moments
    memory: float  # bytes; with gradients, gathered weights and saved activations
    gathering: Traffic
    reducing: Traffic
    compute: float  # seconds
    gathering_seconds: float
    reducing_seconds: float
    gathers: int
    layers: int

    @property
    def exposed(self) -> float:
        """Seconds of communication that cannot overlap with computation, a third of which is the forward pass.

        The first gather overlaps with the forward pass, the rest with the backward pass, except that of one layer: the
        first gather and the last gradients have nothing to overlap with.
        """
        forward, backward = self.compute / 3, self.compute * 2 / 3
        first = self.gathering_seconds / self.gathers
        rest = self.gathering_seconds - first + self.reducing_seconds
        hidden = min(first, forward) + min(rest, backward)
        return max(first + rest - hidden, (first + rest) / self.layers)

    @property
    def efficiency(self) -> tuple[float, float]:
        """The share of computation in a step: without overlap, and with all possible overlap."""
        communication = self.gathering_seconds + self.reducing_seconds
        return self.compute / (self.compute + communication), self.compute / (self.compute + self.exposed)


def gather(payload: float, inside: int, across: int) -> Traffic:
    """An all-gather (or reduce-scatter) of `payload` bytes over `inside` GPUs in each of `across` nodes.

    Each GPU of a node receives its share over the network, and passes it on over NVLink.
    """
    network = payload * (across - 1) / across / inside
    return Traffic(payload * (inside - 1) / inside, network)


def needs(job: Job, *, data: int, fsdp: int) -> Needs:
    """The cost for a mesh whose `fsdp` axis spans GPUs of the same node first."""
    if data * fsdp != job.devices:
        raise ValueError(f"data {data} × fsdp {fsdp} must equal the {job.devices} GPUs of the job.")
    shard_inside, shard_across = min(fsdp, job.gpus), max(1, fsdp // job.gpus)
    copy_inside = max(1, job.gpus // fsdp)
    weights, gradients = job.parameters * job.compute_bytes, job.parameters * job.gradient_bytes
    gathering = gather(weights, shard_inside, shard_across).times(job.gathers)
    scattered = gather(gradients, shard_inside, shard_across)
    reducing = scattered.plus(gather(gradients / fsdp, copy_inside, data // copy_inside).times(2))
    # two layers at a time if the weights are gathered again, otherwise all of them
    gathered = weights if fsdp == 1 or job.gathers == 1 else 2 * weights / job.layers
    kept = job.tokens * (
        job.layers * job.activations * job.width + 2 * 4 * job.vocabulary
    )  # logits and their gradients
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
    """Bytes of tokens and targets that a node reads per second, if a step takes `seconds`."""
    return job.gpus * job.tokens * 2 * job.token_bytes / seconds


def checkpoint_seconds(job: Job, fsdp: int) -> tuple[float, float, float]:
    """Seconds from the GPU to its host, then to the disk if every node writes its share, and if one writes all."""
    return job.state / fsdp / job.host, job.state / job.nodes / job.disk, job.state / job.disk


def meshes(job: Job) -> list[tuple[int, int]]:
    """Data-parallel, sharded within a node, sharded over all GPUs: (data, fsdp)."""
    return [(job.devices, 1), (job.nodes, job.gpus), (1, job.devices)]


def table(job: Job) -> Table:
    """A row per mesh."""
    rows = Table(
        "mesh",
        "state",
        "memory",
        "NVLink",
        "network",
        "compute",
        "gather",
        "reduce",
        "efficiency: min, max",
    )
    for data, fsdp in meshes(job):
        found = needs(job, data=data, fsdp=fsdp)
        total = found.gathering.plus(found.reducing)
        low, high = found.efficiency
        rows.add_row(
            f"{{data: {data}, fsdp: {fsdp}}}",
            *(f"{size / 1e9:.2f} GB" for size in (found.state, found.memory, total.nvlink, total.network)),
            *(f"{1000 * t:.0f} ms" for t in (found.compute, found.gathering_seconds, found.reducing_seconds)),
            f"{low:.0%}, {high:.0%}",
        )
    return rows


def report(job: Job) -> None:
    """Prints all tables."""
    echo(f"{job.parameters:,} parameters, {job.devices} GPUs, {job.texts_per_gpu} texts of {job.context} on each:")
    slow, fast = (1000 * job._replace(share=share).compute for share in (0.4, 0.5))
    echo(f"{job.devices * job.tokens:,} tokens and {job.devices * job.flops:.3g} FLOPs per step, ", end="")
    echo(f"{slow:.0f} ms at 40 % of the peak, {fast:.0f} ms at 50 %")
    echo(table(job))
    fetch, shared, alone = checkpoint_seconds(job, job.gpus)
    echo(f"input {input_rate(job, job.compute) / 1e6:.2f} MB/s per node; checkpoint {job.state / 1e9:.1f} GB, ", end="")
    echo(f"{fetch:.2f} s to the hosts, {shared:.2f} s to the disk by all nodes, {alone:.1f} s by one")


def main() -> None:
    changes = dict(entry.split("=", 1) for entry in sys.argv[1:])
    unknown = sorted(set(changes) - set(Job._fields))
    if unknown:
        sys.exit(f"Unknown field: {', '.join(unknown)}. Fields: {', '.join(Job._fields)}.")
    report(Job(**{name: type(Job._field_defaults[name])(float(value)) for name, value in changes.items()}))


if __name__ == "__main__":
    main()
