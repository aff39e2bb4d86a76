"""How `make bench-scaling` reads HLO, and its cost model."""

import doctest
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FOLDER = Path(__file__).parents[2] / "benchmarks"
READER: dict[str, Any] = runpy.run_path(str(FOLDER / "hlo_collectives.py"))
COST_MODEL: dict[str, Any] = runpy.run_path(str(FOLDER / "scaling_cost_model.py"))
collectives_of, Job, needs = READER["collectives_of"], COST_MODEL["Job"], COST_MODEL["needs"]

HLO = """\
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

GPU_HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%cut (p.0: f32[16], p.1: s32[]) -> f32[4] {
  %p.0 = f32[16]{0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %slice = f32[4]{0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={4}
}

ENTRY %main (a: f32[16], b: bf16[8,2], i: s32[]) -> f32[4] {
  %a = f32[16]{0} parameter(0)
  %b = bf16[8,2]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %ar = ((f32[16]{0}), f32[16]{0}) all-reduce-start(%a), replica_groups=mesh['x'=2,'y'=4] {'x','y'}, to_apply=%add
  %ar.done = f32[16]{0} all-reduce-done(%ar)
  %mine = f32[4]{0} fusion(%ar.done, %i), kind=kLoop, calls=%cut
  %two = ((f32[16]{0}, f32[16]{0}), (f32[16]{0}, f32[16]{0})) all-reduce-start(%a, %a), replica_groups=[4,2]<=[8]
  %two.done = (f32[16]{0}, f32[16]{0}) all-reduce-done(%two)
  %kept = f32[16]{0} get-tuple-element(%two.done), index=0
  %seen = f32[16]{0} get-tuple-element(%two.done), index=1
  %half = f32[4]{0} fusion(%seen, %i), kind=kLoop, calls=%cut
  %rs = ((bf16[8,2]{1,0}, /*index=1*/f32[16]{0}), (bf16[2,2]{1,0}, /*index=1*/f32[4]{0})) \
reduce-scatter-start(%b, %a), \
replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}, to_apply=%add, metadata={op_name="transpose(jvp())/dot"}
  %rs.done = (bf16[2,2]{1,0}, f32[4]{0}) reduce-scatter-done(%rs)
  %part = f32[4]{0} get-tuple-element(%rs.done), index=1
  %rest = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%part), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %rest.done = f32[4]{0} all-reduce-done(%rest)
  %ag = ((f32[4]{0}, bf16[2,2]{1,0}), (f32[16], bf16[8,2])) all-gather-start(%part, %b), replica_groups=[2,4]<=[8]
  %ag.done = (f32[16]{0}, bf16[8,2]{1,0}) all-gather-done(%ag)
  ROOT %out = f32[4]{0} add(%mine, %rest.done)
}
"""


@pytest.mark.parametrize("name", ["array_bytes", "group_size", "ring_bytes"])
def test_the_doctests_of_the_reader_pass(name):
    (example,) = doctest.DocTestFinder().find(READER[name], name, globs=READER)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_every_collective_is_counted_once_with_its_bytes_and_once_per_iteration_of_its_loop():
    found = [(one.kind, one.payload, one.group, one.times, one.is_certain) for one in collectives_of(HLO)]
    assert found == [
        ("all-reduce", 4 * (16 * 4 + 3), 8, 1, True),
        ("all-gather", 2 * 20, 4, 1, True),  # start and done count once, and operands do not count
        ("reduce-scatter", 4 * 32, 4, 1, True),
        ("collective-permute", 4 * 6, 8, 5, True),
        ("collective-permute", 4 * 6, 8, 1, False),
    ]


def test_the_phase_of_a_collective_is_known():
    assert [one.phase for one in collectives_of(HLO)][:3] == ["backward", "forward", "update"]


def test_an_all_reduce_that_is_only_sliced_could_be_a_reduce_scatter():
    reduced = collectives_of(HLO)[0]
    assert reduced.sliced == ((4 * 16 * 4, 4),)  # in four slices; the other array is not sliced
    factor = 2 * 7 / 8
    assert reduced.sent == factor * (256 + 12)
    # scattered among four, and reduced among the two that have the same slice
    assert reduced.sent_if_scattered == 256 * 3 / 4 + 2 * 1 / 2 * 64 + factor * 12


def test_an_asynchronous_gpu_collective_is_counted_by_its_result():
    found = [(one.kind, one.payload, one.group) for one in collectives_of(GPU_HLO)]
    assert found == [
        ("all-reduce", 4 * 16, 8),
        ("all-reduce", 2 * 4 * 16, 2),
        ("reduce-scatter", 2 * 8 * 2 + 4 * 16, 4),  # the full array, of which a quarter is the result
        ("all-reduce", 4 * 4, 2),
        ("all-gather", 4 * 16 + 2 * 8 * 2, 4),
    ]


def test_slices_are_found_after_the_done_of_an_all_reduce_and_a_reduce_scatter_has_none():
    alone, two, scattered, *_ = collectives_of(GPU_HLO)
    assert (alone.sliced, two.sliced) == (((4 * 16, 4),), ((4 * 16, 4),))
    assert scattered.sent == scattered.sent_if_scattered == (32 + 64) * 3 / 4


def test_an_inserted_collective_belongs_to_the_phase_of_its_operand():
    assert [one.phase for one in collectives_of(GPU_HLO)][2:4] == ["backward", "backward"]


@pytest.fixture(scope="module")
def gradient() -> str:
    """The HLO of a sharded gradient of examples on eight devices, and of three in a loop."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def turn(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            part = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w + total)
            return jax.lax.with_sharding_constraint(total + part, replicated), None

        total = jax.lax.scan(turn, w, None, length=3)[0]
        return jax.grad(lambda w: jnp.sin(x @ w).sum())(total)

    compiled = jax.jit(step, in_shardings=(replicated, rows), out_shardings=rows)
    return compiled.lower(jnp.ones((16, 32)), jnp.ones((64, 16))).compile().as_text() or ""


def test_the_hlo_of_xla_is_read(gradient):
    inside, after = collectives_of(gradient)
    assert {inside.kind, after.kind} <= {"all-reduce", "reduce-scatter"}
    assert (inside.payload, inside.group, inside.times, inside.is_certain) == (4 * 16 * 32, 8, 3, True)
    assert (after.payload, after.group, after.times) == (4 * 16 * 32, 8, 1)
    assert after.sent_if_scattered == 4 * 16 * 32 * 7 / 8


# the cost model


def test_the_model_of_the_page_has_as_many_parameters_as_gpt2_xl():
    assert Job().parameters == 1_557_611_200
    assert Job().state == 12 * 1_557_611_200


def test_operations_are_six_for_every_weight_and_token_and_those_of_attention():
    job = Job(layers=2, width=10, vocabulary=7, context=3, texts_per_gpu=5)
    assert job.flops == 15 * (6 * (2 * 1200 + 70) + 12 * 2 * 10 * 3)


@pytest.mark.parametrize(("data", "fsdp"), [(256, 1), (32, 8), (1, 256), (128, 2)])
def test_the_network_traffic_of_a_node_does_not_depend_on_the_sharding(data, fsdp):
    job = Job(gathers=1, compute_bytes=4, gradient_bytes=4)
    found = needs(job, data=data, fsdp=fsdp)
    bytes_ = 4 * job.parameters
    # gradients leave and sums or weights enter: twice all bytes, through eight GPUs, from the 31 other nodes
    assert found.gathering.network + found.reducing.network == pytest.approx(2 * bytes_ / 8 * 31 / 32)
    assert found.state == job.state / fsdp


def test_within_a_node_sharding_is_a_gather_and_a_reduce_scatter_by_nvlink():
    job = Job(nodes=1)
    found = needs(job, data=1, fsdp=8)
    assert found.gathering.nvlink == pytest.approx(2 * 2 * job.parameters * 7 / 8)
    assert found.reducing.nvlink == pytest.approx(job.gradient_bytes * job.parameters * 7 / 8)
    assert found.gathering.network == found.reducing.network == 0


def test_communication_that_cannot_overlap_lengthens_the_step():
    slow, fast = (needs(Job(network=rate), data=32, fsdp=8) for rate in (1e9, 1e15))
    communication = slow.gathering_seconds + slow.reducing_seconds
    hidden = slow.gathering_seconds + slow.compute * 2 / 3  # the gather overlaps fully, the reduction does not
    assert communication - hidden < slow.exposed < communication
    assert fast.exposed == pytest.approx((fast.gathering_seconds + fast.reducing_seconds) / 48)
    assert slow.efficiency[0] < slow.efficiency[1] < fast.efficiency[1] < 1


def test_a_mesh_of_another_size_than_the_job_is_an_error():
    with pytest.raises(ValueError, match="data 32 × fsdp 4 .* 256 GPUs"):
        needs(Job(), data=32, fsdp=4)


def test_a_checkpoint_is_written_by_all_nodes_or_by_one():
    fetch, shared, alone = COST_MODEL["checkpoint_seconds"](Job(), 8)
    assert alone == pytest.approx(12 * 1_557_611_200 / 2e9) == pytest.approx(32 * shared)
    assert fetch == pytest.approx(12 * 1_557_611_200 / 8 / 25e9)


# the table


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "scaling.py"))


def test_all_kinds_of_reductions_are_compared_with_each_other(script):
    case, params = script["Case"](data=2, fsdp=4), {"kernel": jnp.zeros((8, 5)), "bias": jnp.zeros(8)}
    needs = script["needed"](case, params, {"kernel": P("fsdp"), "bias": P()})
    size = 4 * 48
    gathered, again, scattered, reduced = (need.sent for need in needs)
    assert gathered == again == scattered == size * 3 / 4
    assert reduced == 2 * size / 4 * 1 / 2
    found = [READER["Collective"]("all-reduce", size, 8, ((size, 4),), source="transpose(jvp())")]
    lines = {line[0]: line for line in script["compared"](needs[2:], found)}
    assert lines["backward"][3:] == (f"{size * 7 / 4 / (size * 3 / 4 + size / 4):.2f}", "1.00")


def test_a_tensor_axis_needs_two_all_reduces_per_block_and_pass(script):
    gpt, batch = script["GPT"], script["BATCH"]
    forward, backward = script["needed"](
        script["Case"](tensor=8), {"kernel": jnp.zeros((8, 8))}, {"kernel": P("tensor")}
    )
    sums = 2 * gpt.layers + 1
    assert (forward.number, backward.number) == (sums + 3, sums)
    assert backward.sent == sums * 2 * 7 / 8 * batch * gpt.context * gpt.width * 4


def test_a_model_in_bf16_needs_half_the_bytes_except_for_the_loss(script):
    case, params, specs = script["Case"](data=2, tensor=4), {"kernel": jnp.zeros((8, 8))}, {"kernel": P("tensor")}
    single, half = (sum(need.sent for need in script["needed"](case, params, specs, name)) for name in ("f32", "bf16"))
    loss = 3 * 2 * 3 / 4 * script["BATCH"] // 2 * script["GPT"].context * 4
    assert half - loss == (single - loss) / 2


def test_a_row_by_kind_has_the_number_and_bytes_of_each_kind(script):
    made = READER["Collective"]
    found = [made("all-gather", 8e6, 8), made("all-gather", 8e6, 8, times=2), made("all-to-all", 8e6, 8)]
    params, specs = {"kernel": jnp.zeros((1000, 1000))}, {"kernel": P()}
    needs = script["needed"](script["Case"](fsdp=8), params, specs)
    line = "10.500 MB", "3: 21.000 MB", "", "", "1: 7.000 MB", "28.000 MB", "2.67"
    assert script["by_kind"](needs, found) == line
    unsure = [made("all-gather", 8e6, 8, is_certain=False)]
    assert script["by_kind"](needs, unsure)[5] == "at least 7.000 MB"


@pytest.mark.slow
def test_the_aot_step_has_the_collectives_of_the_step_of_the_trainer(script):
    case, model = script["Case"](data=2, fsdp=4), replace(script["GPT"], layers=1, heads=2, width=64)
    aot = script["compile_aot"](case, jax.devices(), "f32", model)
    batch = script["batch_of"](script["BATCH"], case.vocabulary)
    program = script["trainer_for"](case, jax.devices(), batch, model=model).prepare([batch])
    state, placed = program.init(jax.random.key(0), batch), program.place(batch, stacked=False)
    bytes_held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert script["state_bytes"](aot.state)[0] == bytes_held
    buffer = program.train_buffer(state, placed, script["BUFFER_ROWS"])
    client = jax.devices()[0].client
    before = client.live_executables()
    program.train_step(state, buffer, placed)
    texts = [one.hlo_modules()[0].to_string() for one in client.live_executables() if one not in before]
    both = (collectives_of(hlo) for hlo in (aot.hlo, max(texts, key=len)))
    expected, found = ([(one._replace(source=""), one.phase) for one in each] for each in both)  # other names
    assert expected == found != []


def test_eight_gpus_need_a_gpu(script):
    if jax.default_backend() == "gpu":
        pytest.skip("has a GPU")
    with pytest.raises(SystemExit, match="--gpus"):
        script["eight_gpus"]()
