"""What `make bench-scaling` reads out of HLO, and what it computes from sizes."""

import doctest
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FOLDER = Path(__file__).parents[2] / "benchmarks"
READER: dict[str, Any] = runpy.run_path(str(FOLDER / "hlo_collectives.py"))
PAPER: dict[str, Any] = runpy.run_path(str(FOLDER / "scaling_on_paper.py"))
collectives_of, Job, needs = READER["collectives_of"], PAPER["Job"], PAPER["needs"]

WRITTEN = """\
HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%cut (p.0: f32[16,4], p.1: s32[]) -> f32[4,4] {
  %p.0 = f32[16,4]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[4,4]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={4,4}
}

%scatter (p: f32[32]) -> f32[8] {
  %p = f32[32]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%sum
}

%turn (s: (s32[], f32[6])) -> (s32[], f32[6]) {
  %s = (s32[], f32[6]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[6]{0} get-tuple-element(%s), index=1
  %permute = f32[6]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], f32[6]{0}) tuple(%i, %permute)
}

ENTRY %main (w: f32[16,4], v: f32[3], i: s32[], s: (s32[], f32[6])) -> f32[4,4] {
  %w = f32[16,4]{1,0} parameter(0)
  %v = f32[3]{0} parameter(1)
  %i = s32[] parameter(2)
  %s = (s32[], f32[6]{0}) parameter(3)
  %both = (f32[16,4], /*x*/f32[3]) all-reduce(%w, %v), replica_groups=[1,8]<=[8], metadata={op_name="transpose(jvp())"}
  %first = f32[16,4]{1,0} get-tuple-element(%both), index=0
  %second = f32[3]{0} get-tuple-element(%both), index=1
  %mine = f32[4,4]{1,0} fusion(%first, %i), kind=kLoop, calls=%cut
  %start = (bf16[5], bf16[20]) all-gather-start(%v), replica_groups=mesh['a'=2,'b'=4] {'b'}, metadata={op_name="jvp()"}
  %done = bf16[20]{0} all-gather-done(%start)
  %begun = ((f32[32]), f32[8], u32[]) async-start(%w), calls=%scatter
  %ended = f32[8]{0} async-done(%begun)
  %known = (s32[], f32[6]{0}) while(%s), condition=%sum, body=%turn, backend_config={"known_trip_count":{"n":"5"}}
  %unknown = (s32[], f32[6]{0}) while(%known), condition=%sum, body=%turn
  ROOT %out = f32[4,4]{1,0} add(%mine, %mine)
}
"""


@pytest.mark.parametrize("name", ["array_bytes", "group_size", "ring_bytes"])
def test_the_examples_of_the_reader_are_true(name):
    (example,) = doctest.DocTestFinder().find(READER[name], name, globs=READER)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_every_collective_is_counted_once_with_its_bytes_and_as_often_as_its_loop_turns():
    found = [(one.kind, one.payload, one.group, one.times, one.is_certain) for one in collectives_of(WRITTEN)]
    assert found == [
        ("all-reduce", 4 * (16 * 4 + 3), 8, 1, True),
        ("all-gather", 2 * 20, 4, 1, True),  # start and done are one, and what it was given does not count
        ("reduce-scatter", 4 * 32, 4, 1, True),
        ("collective-permute", 4 * 6, 8, 5, True),
        ("collective-permute", 4 * 6, 8, 1, False),
    ]


def test_it_is_told_which_pass_asked_for_a_collective():
    assert [one.phase for one in collectives_of(WRITTEN)][:3] == ["backward", "forward", "update"]


def test_an_all_reduce_that_is_only_sliced_could_be_a_reduce_scatter():
    reduced = collectives_of(WRITTEN)[0]
    assert reduced.sliced == ((4 * 16 * 4, 4),)  # in four slices; the other array is kept whole
    whole = 2 * 7 / 8
    assert reduced.sent == whole * (256 + 12)
    # scattered among four, and reduced among the two that have the same slice
    assert reduced.sent_if_scattered == 256 * 3 / 4 + 2 * 1 / 2 * 64 + whole * 12


@pytest.fixture(scope="module")
def gradient() -> str:
    """The HLO of a gradient whose examples are on eight devices, and which is split over them itself; three times."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def turn(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            part = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w + total)
            return jax.lax.with_sharding_constraint(total + part, whole), None

        total = jax.lax.scan(turn, w, None, length=3)[0]
        return jax.grad(lambda w: jnp.sin(x @ w).sum())(total)

    compiled = jax.jit(step, in_shardings=(whole, rows), out_shardings=rows)
    return compiled.lower(jnp.ones((16, 32)), jnp.ones((64, 16))).compile().as_text() or ""


def test_what_xla_compiles_is_read(gradient):
    inside, after = collectives_of(gradient)
    assert {inside.kind, after.kind} <= {"all-reduce", "reduce-scatter"}
    assert (inside.payload, inside.group, inside.times, inside.is_certain) == (4 * 16 * 32, 8, 3, True)
    assert (after.payload, after.group, after.times) == (4 * 16 * 32, 8, 1)
    assert after.sent_if_scattered == 4 * 16 * 32 * 7 / 8


# on paper


def test_the_model_of_the_page_has_as_many_parameters_as_gpt2_xl():
    assert Job().parameters == 1_557_611_200
    assert Job().state == 12 * 1_557_611_200


def test_operations_are_six_for_every_weight_and_token_and_those_of_attention():
    job = Job(layers=2, width=10, vocabulary=7, context=3, texts_per_gpu=5)
    assert job.flops == 15 * (6 * (2 * 1200 + 70) + 12 * 2 * 10 * 3)


@pytest.mark.parametrize(("data", "fsdp"), [(256, 1), (32, 8), (1, 256), (128, 2)])
def test_what_enters_a_node_is_counted_once_however_it_is_sharded(data, fsdp):
    job = Job(gathers=1, compute_bytes=4, gradient_bytes=4)
    found = needs(job, data=data, fsdp=fsdp)
    bytes_ = 4 * job.parameters
    # gradients go out and sums come in, or weights do: twice the whole, by eight GPUs, from the 31 other nodes
    assert found.gathering.network + found.reducing.network == pytest.approx(2 * bytes_ / 8 * 31 / 32)
    assert found.state == job.state / fsdp


def test_within_a_node_sharding_is_a_gather_and_a_reduce_scatter_by_nvlink():
    job = Job(nodes=1)
    found = needs(job, data=1, fsdp=8)
    assert found.gathering.nvlink == pytest.approx(2 * 2 * job.parameters * 7 / 8)
    assert found.reducing.nvlink == pytest.approx(job.gradient_bytes * job.parameters * 7 / 8)
    assert found.gathering.network == found.reducing.network == 0


def test_what_cannot_run_beside_computing_lengthens_the_step():
    slow, fast = (needs(Job(network=rate), data=32, fsdp=8) for rate in (1e9, 1e15))
    talking = slow.gathering_seconds + slow.reducing_seconds
    beside = slow.gathering_seconds + slow.compute * 2 / 3  # gathering fits, reducing does not
    assert talking - beside < slow.exposed < talking
    assert fast.exposed == pytest.approx((fast.gathering_seconds + fast.reducing_seconds) / 48)
    assert slow.efficiency[0] < slow.efficiency[1] < fast.efficiency[1] < 1


def test_a_mesh_of_another_size_than_the_job_is_refused():
    with pytest.raises(ValueError, match="data 32 × fsdp 4 must be the 256 GPUs"):
        needs(Job(), data=32, fsdp=4)


def test_a_checkpoint_is_written_by_all_nodes_or_by_one():
    fetch, shared, alone = PAPER["checkpoint_seconds"](Job(), 8)
    assert alone == pytest.approx(12 * 1_557_611_200 / 2e9) == pytest.approx(32 * shared)
    assert fetch == pytest.approx(12 * 1_557_611_200 / 8 / 25e9)


# the table


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "scaling.py"))


def test_found_is_compared_with_needed_whatever_reductions_are_called(script):
    case, params = script["Case"](data=2, fsdp=4), {"kernel": jnp.zeros((8, 5)), "bias": jnp.zeros(8)}
    asked = script["needed"](case, params, {"kernel": P("fsdp"), "bias": P()})
    size = 4 * 48
    gathered, again, scattered, reduced = (need.sent for need in asked)
    assert gathered == again == scattered == size * 3 / 4
    assert reduced == 2 * size / 4 * 1 / 2
    found = [READER["Collective"]("all-reduce", size, 8, ((size, 4),), source="transpose(jvp())")]
    lines = {line[0]: line for line in script["compared"](asked[2:], found)}
    assert lines["backward"][3:] == (f"{size * 7 / 4 / (size * 3 / 4 + size / 4):.2f}", "1.00")


def test_two_sums_in_a_block_and_pass_are_needed_for_a_tensor_axis(script):
    gpt, batch = script["GPT"], script["BATCH"]
    forward, backward = script["needed"](
        script["Case"](tensor=8), {"kernel": jnp.zeros((8, 8))}, {"kernel": P("tensor")}
    )
    sums = 2 * gpt.layers + 1
    assert (forward.number, backward.number) == (sums + 3, sums)
    assert backward.sent == sums * 2 * 7 / 8 * batch * gpt.context * gpt.width * 4
