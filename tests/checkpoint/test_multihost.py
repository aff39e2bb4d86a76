"""Real processes that save and restore one checkpoint, and a single process that restores it."""

import errno
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.checkpoint.backend import HostBarrier, probe_all
from jax_trainer.checkpoint.errors import MultiHostError
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import DataError, DataSource, Position
from jax_trainer.sharding.group import ProcessGroup
from jax_trainer.testing import assert_same_bits
from tests.rows import noted_row
from tests.sharding.processes import pairs

AT = Position(2, 7)

# how each array is split over the devices; "local": not shared between processes
SPLIT = {
    "split": ("data",),
    "split_twice": ("data", "fsdp"),
    "large_split": (None, ("data", "fsdp")),
    "large_replicated": (),
    "small_replicated": (),
    "one": (),
    "none": (),
    "host": "local",
    "large_host": "local",
    "device": "local",
    "committed": "local",
}


def values() -> dict[str, np.ndarray]:
    """The values that the processes save, before the step is added."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {
        "split": (8, 3),
        "split_twice": (4, 4, 3),
        "large_split": (300, 80),
        "large_replicated": (200, 130),
        "small_replicated": (7,),
        "one": (),
        "none": (0, 3),
        "host": (3,),
        "large_host": (130, 140),
        "device": (5,),
        "committed": (6,),
    }
    return {name: np.asarray(draw(shape), np.float32) for name, shape in shapes.items()}


COMMON = """
import json, os, time
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_trainer.checkpoint import backend as multihost
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.core.failpoints import arm
from jax_trainer.datasets import DataError, DataSource, Position
from jax_trainer.sharding import process_group

FOLDER, SPLIT, VALUES = Path(arguments[0]), json.loads(arguments[1]), dict(np.load(arguments[2]))
us, AT = process_group(), Position(2, 7)

def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

MESH = mesh_of(data=2, fsdp=2)
def at(*spec, mesh=None):
    return NamedSharding(mesh or MESH, P(*[tuple(one) if isinstance(one, list) else one for one in spec]))

def put(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

def placed(name, value, mesh, split):
    if SPLIT[name] != "local":
        return put(value, at(*(SPLIT[name] if split else ()), mesh=mesh))
    if name == "committed":
        return jax.device_put(value, jax.local_devices()[1])
    return jnp.asarray(value) if name == "device" else value

def state(step, mesh=None, split=True):
    params = {name: placed(name, value + np.float32(step), mesh, split) for name, value in VALUES.items()}
    params["bf16"] = params["small_replicated"].astype(jnp.bfloat16)
    replicated, spread = at(mesh=mesh), at("data", mesh=mesh) if split else at(mesh=mesh)
    one = jax.random.wrap_key_data(put(np.array([3, step], np.uint32), replicated))
    many = jax.random.wrap_key_data(put(np.arange(8, dtype=np.uint32).reshape(4, 2) + np.uint32(step), spread))
    keys = {"one": one, "many": many}
    return TrainState(put(np.int32(step), replicated), params, {}, keys, put(np.arange(2), replicated), {})

def abstract(tree):
    def of(leaf):
        if isinstance(leaf, np.ndarray) or leaf.is_fully_addressable:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return jax.tree.map(of, tree)

def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected)):
        assert type(one) is type(other) and (one.dtype, one.shape) == (other.dtype, other.shape), path
        if isinstance(one, np.ndarray):
            assert one.tobytes() == other.tobytes(), path
            continue
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (path, one.sharding, other.sharding)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        for mine, yours in zip(one.addressable_shards, other.addressable_shards):
            assert np.asarray(mine.data).tobytes() == np.asarray(yours.data).tobytes(), path

def failure(work):
    try:
        work()
    except (CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

def names(folder):
    return sorted(entry.name for entry in folder.iterdir())

def report(what, answer=None):
    print(json.dumps([what, answer]), flush=True)
"""


def state(step: int, sharding: dict[str, NamedSharding] | None = None) -> TrainState:
    """The saved state, in one process."""
    params: dict[str, Any] = {name: value + np.float32(step) for name, value in values().items()}
    params = {name: value if "host" in name else jnp.asarray(value) for name, value in params.items()}
    params["bf16"] = params["small_replicated"].astype(jnp.bfloat16)
    params |= {name: jax.device_put(params[name], place) for name, place in (sharding or {}).items()}
    one = jax.random.wrap_key_data(jnp.array([3, step], jnp.uint32))
    many = jax.random.wrap_key_data(jnp.arange(8, dtype=jnp.uint32).reshape(4, 2) + jnp.uint32(step))
    return TrainState(jnp.int32(step), params, {}, {"one": one, "many": many}, jnp.arange(2), {})


def numbers(tree: Any) -> Any:
    """The tree with key data in place of typed keys."""
    return jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree
    )


def shardings(devices: int) -> dict[str, NamedSharding]:
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    specs = {"split": PartitionSpec("data"), "large_split": PartitionSpec(None, "data")}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


SAVING = """
store = CheckpointStore(FOLDER, keep_latest=2, monitor="loss", patience=60)
store.prepare(state(0))
report("made", names(FOLDER))
store.save(state(1), AT, {"loss": 0.1}, callbacks={"who": {"index": us.index}}, run=lambda: {"primary": us.index})
found, saved = store.restore("latest", state(0))
assert_same(found, state(1))
report("saved", [saved.step, saved.callbacks, saved.run, saved.metrics, store.verify(saved.path)])

for mesh, split in ((None, True), (mesh_of(all=4), False), (mesh_of(data=1, fsdp=4), True)):
    assert_same(store.restore("latest", abstract(state(0, mesh, split)))[0], state(1, mesh, split))
assert_same(store.restore("latest", state(0, mesh_of(data=4, fsdp=1)))[0], state(1, mesh_of(data=4, fsdp=1)))

for step, loss in ((2, 0.3), (3, 0.2), (4, 0.4)):
    store.save(state(step), AT, {"loss": loss}, wait=False)
store.wait()
best, latest = store.best(), store.latest()
report("kept", [store.steps(), best.step, latest.step, names(FOLDER)])
report("listed", [[one.step, one.problem, one.bytes > 1e5, one.metrics] for one in store.infos()])

if us.is_primary:
    file = max((store.folder / "step_00000004").rglob("*"), key=lambda file: file.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
us.all_gather("damaged")
found, saved = store.restore("latest", state(0))
assert_same(found, state(3))
report("skipped", saved.step)
report("refused", [failure(lambda: store.restore(which, state(0))) for which in (4, 7, "no such")])
report("does not fit", failure(lambda: store.restore(3, state(0).replace(params={}))))
like = state(0).replace(params={}) if us.index else state(0)
report("does not fit one", failure(lambda: store.restore(3, like)))
store.mark_resumed_from(saved)
report("went back", store.steps())
store.save(state(5), AT, {"loss": 0.5})
store.completed()
report("completed", [store.steps(), names(FOLDER)])

def without_split(step):
    now = state(step)
    return now.replace(params={"small_replicated": now.params["small_replicated"]}, opt_state={})

small = CheckpointStore(FOLDER.parent / "small", patience=60)
small.save(without_split(1), AT, {})
assert_same(small.restore("latest", without_split(0))[0], without_split(1))
report("nothing is split", small.steps())

options = {"keep_latest": 1, "monitor": "loss", "weights_only_best": True, "patience": 60}
weights_only = CheckpointStore(FOLDER.parent / "weights_only", **options)
for step in (1, 2):
    weights_only.save(state(step), AT, {"loss": step})
weights = ("step", "params", "model_state", "rng", "extra")
assert_same(weights_only.restore("best", state(0), only=weights)[0], state(1).replace(opt_state=state(0).opt_state))
omitted = [one.without for one in weights_only.infos()]
report("weights_only", [weights_only.steps(), weights_only.best().without, omitted])

multihost.is_on_cpu, kept = lambda _: False, multihost.is_on_cpu  # and no device reports free memory
small.save(state(2), AT, {})
multihost.is_on_cpu = kept
assert_same(small.restore("latest", state(0))[0], state(2))
small.save(state(3), Position(2, 7, {"drawn": [us.index, 5]}), {})
report("position", small.restore("latest", state(0))[1].position.state)
"""

FAILING = """
FOLDER = FOLDER.parent / "failing"

def failing(step, spec, process):
    arm(spec if us.index == process else None)
    store.save(state(step), AT, {}, wait=False)
    store.check()
    primary = failure(store.wait)
    arm(None)
    store.check()
    us.all_gather("to look")
    found = names(FOLDER)
    us.all_gather("looked at")
    return [primary, found]

assert_same(CheckpointStore(FOLDER.parent / "of one", patience=60).restore("latest", state(0))[0], state(9))

store = CheckpointStore(FOLDER, patience=60)
store.save(state(1), AT, {})
report("raised", failing(2, "mid_array:raise", 1))
report("in the primary process", failing(2, "before_rename:enospc", 0))
report("passed", failing(2, "mid_array:eio", 1))
report("primary passed", failing(3, "before_manifest:eio", 0))
def no_room(arrays):
    raise MemoryError("no room for the pack")

if us.is_primary:
    multihost.packed, kept = no_room, multihost.packed
report("before the arrays", failing(4, None, 0)[0])
if us.is_primary:
    multihost.packed = kept
bad = state(4).replace(params={"text": "none"}) if us.index else state(4)
report("absent", failure(lambda: store.save(bad, AT, {})))
report("other steps", failure(lambda: store.save(state(4 + us.index), AT, {})))
store.save(state(4), AT, {})
assert_same(store.restore("latest", state(0))[0], state(4))
report("resumed", store.steps())

hasty = CheckpointStore(FOLDER, patience=1)
arm("mid_array:sleep=2.5" if us.index else None)
report("late", failure(lambda: hasty.save(state(5), AT, {})))
arm(None)
us.all_gather("to go on")
store.save(state(5), AT, {})
report("found each other again", [store.steps(), names(FOLDER)])
(FOLDER.parent / "file").touch()
report("no folder", failure(lambda: CheckpointStore(FOLDER.parent / "file", patience=60).prepare(state(0))))

def on_devices(step):
    now = state(step)
    return now.replace(params={name: now.params[name] for name in now.params if SPLIT.get(name) != "local"})

def one_step(now):
    new = {name: leaf * 2 for name, leaf in now.params.items()}
    return now.replace(step=now.step + 1, params=new), now.params["split"].sum()

step, now, count = jax.jit(one_step, donate_argnums=0), on_devices(10), 0
store.prepare(now)
arm("before_manifest:sleep=3" if us.is_primary else None)
for number in range(2):
    expected = jax.tree.map(jnp.copy, now)
    store.save(now, AT, {}, wait=False)
    for _ in range(20):
        now, total = step(now)
        total.block_until_ready()
        count += us.all_gather("is it saving", str(int(store._thread.is_busy)))[0] == "1"
    store.wait()
    assert_same(store.restore("latest", on_devices(0))[0], expected)
report("trained during the save", [count >= 20, store.steps()])

others = [CheckpointStore(FOLDER.parent / name, patience=60) for name in ("left", "right")]
for step in (1, 2, 3):
    for other in others:
        other.save(state(step), AT, {}, wait=False)
for other in others:
    other.wait()
    assert_same(other.restore("latest", state(0))[0], state(3))
report("two at once", [other.steps() for other in others])
"""

KILLED = """
FOLDER = FOLDER.parent / "killed"
victim, spec = int(arguments[3]), arguments[4]
CheckpointStore(FOLDER, patience=60).save(state(1), AT, {})
store = CheckpointStore(FOLDER, keep_latest=1, patience=3)
arm(spec if us.index == victim else None)
started = time.monotonic()
primary = failure(lambda: store.save(state(2), AT, {}))
report("missed", [primary, time.monotonic() - started])
os._exit(0)
"""


@dataclass
class Reports:
    """The reports of two processes, and their folder."""

    folder: Path
    primary: dict[str, Any]
    other: dict[str, Any]


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.slow)])
def reports(tmp_path_factory) -> Reports:
    """One pair of processes for all tests: starting them takes a while."""
    folder = tmp_path_factory.mktemp("together")
    CheckpointStore(folder / "of one").save(state(9), AT, {})
    ended = run(folder, SAVING + FAILING + KILLED, 1, "mid_array:kill")
    assert ended[0].code == 0, ended[0].err
    return Reports(folder, *(dict(map(json.loads, pairs.lines(one))) for one in ended))


def run(folder: Path, text: str, victim: int, spec: str) -> list[pairs.Ended]:
    """Runs `text` in two processes, of which one kills itself at a point of the second save of `KILLED`."""
    np.savez(folder / "values.npz", allow_pickle=False, **values())
    arguments = (str(folder / "checkpoints"), json.dumps(SPLIT), str(folder / "values.npz"))
    ended = pairs.ended(pairs.start(COMMON + text, *arguments, str(victim), spec, devices=2))
    assert ended[victim].code == -9, "\n".join(one.out + one.err for one in ended)
    return ended


def left(folder: Path) -> list[int]:
    """The checkpoints after a kill during the second save; the last one must be complete."""
    store = CheckpointStore(folder / "killed")
    steps = store.steps()
    assert_same_bits(numbers(store.restore("latest", state(0))[0]), numbers(state(steps[-1])))
    store.save(state(3), AT, {})
    assert all(re.fullmatch(r"step_\d+", path.name) for path in store.folder.iterdir())
    return steps


def test_two_processes_save_and_restore_one_checkpoint(reports):
    primary, secondary = reports.primary, reports.other
    assert primary["made"] == []
    assert primary["saved"] == [1, {"who": {"index": 0}}, {"primary": 0}, {"loss": 0.1}, ""]
    assert primary["kept"] == [[1, 3, 4], 1, 4, ["step_00000001", "step_00000003", "step_00000004"]]
    assert primary["listed"] == [[step, "", True, {"loss": loss}] for step, loss in ((1, 0.1), (3, 0.2), (4, 0.4))]
    assert (primary["skipped"], primary["went back"]) == (3, [1, 3])
    assert primary["completed"] == [[1, 3, 5], ["step_00000001", "step_00000003", "step_00000005"]]
    assert primary["weights_only"] == [[1, 2], ["opt_state"], [["opt_state"], []]]
    for what in ("saved", "kept", "listed", "skipped", "went back", "completed", "nothing is split", "weights_only"):
        assert secondary[what] == primary[what]


def test_a_checkpoint_that_one_process_cannot_restore_is_rejected_by_all(reports):
    primary, secondary = reports.primary, reports.other
    for message, repeated in zip(primary["refused"], secondary["refused"], strict=True):
        assert repeated == f"CheckpointError: process 0 of 2: {message}"
    assert "is damaged" in primary["refused"][0] and "step 7" in primary["refused"][1]
    assert primary["does not fit"] == secondary["does not fit"] and "not expected, found" in secondary["does not fit"]
    assert primary["does not fit one"].startswith("CheckpointError: process 1 of 2: CheckpointError: The checkpoint")


def test_one_process_restores_a_checkpoint_of_two_with_any_sharding(reports):
    store = CheckpointStore(reports.folder / "checkpoints")
    one, saved = store.restore("latest", state(0))
    assert_same_bits(numbers(one), numbers(state(5)))
    assert (saved.step, saved.position) == (5, AT)
    for devices in (8, 4, 1):
        there = state(0, shardings(devices))
        found = store.restore(1, there)[0]
        assert_same_bits(numbers(found), numbers(state(1)))
        assert found.params["large_split"].sharding == there.params["large_split"].sharding


def test_a_failure_in_one_process_fails_in_all_and_the_next_save_works(reports):
    primary, secondary = reports.primary, reports.other
    for what in ("raised", "passed", "primary passed", "resumed"):
        assert secondary[what] == primary[what]
    path = reports.folder / "failing" / "step_00000002"
    failed = rf"SaveError: .*step 2 .*{re.escape(str(path))}"
    message, found = primary["raised"]
    assert re.match(rf"{failed}.*process 1 of 2: FaultInjected: failpoint 'mid_array'", message)
    assert found == ["step_00000001"]
    for message, found in (primary["in the primary process"], secondary["in the primary process"]):
        assert re.match(rf"{failed}.*full", message)
        assert "process 0 of 2: OSError: [Errno 28]" in message and found == ["step_00000001"]
    assert primary["passed"] == [None, ["step_00000001", "step_00000002"]]
    assert primary["primary passed"] == [None, ["step_00000002", "step_00000003"]]
    assert "process 0 of 2: MemoryError: no room for the pack" in secondary["before the arrays"]
    assert "process 1 of 2: CheckpointError: params.text is 'none'" in primary["absent"]
    assert secondary["absent"].startswith("CheckpointError: params.text is 'none'")
    for one in (primary, secondary):
        assert re.search("process 1 of 2: CheckpointError: .*step_00000005.*step_00000004", one["other steps"])
    assert primary["resumed"] == [3, 4]
    assert "2 processes" in primary["late"] and "2 processes" in secondary["late"]
    assert primary["found each other again"] == [[4, 5], ["step_00000004", "step_00000005"]]
    assert "not a folder" in primary["no folder"] and primary["no folder"] in secondary["no folder"]


def test_saves_run_concurrently_with_collectives_and_another_store(reports):
    primary, secondary = reports.primary, reports.other
    assert primary["trained during the save"] == secondary["trained during the save"] == [True, [10, 30]]
    assert primary["two at once"] == secondary["two at once"] == [[2, 3], [2, 3]]


def test_a_killed_process_leaves_no_partial_checkpoint_and_is_detected_in_time(reports):
    assert left(reports.folder) == [1]
    message, seconds = reports.primary["missed"]
    assert re.match("SaveError: .*step 2 .*2 processes.*'checkpoints/.*/killed/saving'", message)
    assert 2 < seconds < 20
    assert "missed" not in reports.other


@pytest.mark.slow  # a pair of processes each
@pytest.mark.parametrize(
    ("point", "steps"),
    [
        ("before_rename", [1]),
        ("after_rename", [1, 2]),
        ("mid_delete", [2]),
    ],
)
def test_whenever_the_primary_process_is_killed_the_remaining_checkpoints_are_complete(tmp_path, point, steps):
    run(tmp_path, KILLED, 0, f"{point}:kill")
    assert left(tmp_path) == steps


class Scripted(ProcessGroup):
    """One of two processes; the messages of the other one are given."""

    def __init__(self, index: int, *answers: dict[str, Any]) -> None:
        super().__init__(index, 2)
        self._answers = [json.dumps(one) for one in answers]

    def all_gather(self, topic: str, value: str = "", *, timeout: float = 1.0) -> list[str]:
        other = self._answers.pop(0)
        return [other, value] if self.index else [value, other]


@pytest.fixture
def barrier_of(monkeypatch, tmp_path):
    """Creates the barrier of a process in a group."""

    def make(us: ProcessGroup) -> HostBarrier:
        monkeypatch.setattr("jax_trainer.checkpoint.backend.process_group", lambda: us)
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        return HostBarrier(tmp_path, "asking", 1.0)

    return make


def test_all_retry_only_if_every_failure_is_transient(barrier_of):
    for code, agreed in [(errno.EIO, errno.EIO), (errno.ENOSPC, errno.ENOSPC), (None, None)]:
        with noted_row(code, agreed):

            def fail() -> None:
                raise OSError(errno.EIO, "for a moment")

            barrier = barrier_of(Scripted(0, {"text": "", "problem": "what the other has", "errno": code}))
            with pytest.raises(
                MultiHostError, match="^process 0 of 2: OSError: .*for a moment; process 1 of 2: what the"
            ) as error:
                barrier.all_do(fail)
            assert error.value.errno == agreed
            assert isinstance(error.value.__cause__, OSError)


def test_a_process_that_does_not_see_the_folder_of_the_primary_process_says_so(barrier_of, tmp_path):
    barrier = barrier_of(Scripted(1, {"result": str(tmp_path / "elsewhere")}, {"result": None}))
    with pytest.raises(CheckpointError, match="elsewhere.*processes"):
        probe_all(barrier, tmp_path, lambda: None)


def test_a_single_process_exchanges_nothing(tmp_path, monkeypatch):
    def ask(*_: Any, **__: Any) -> Any:
        raise AssertionError("a message was sent")

    monkeypatch.setattr("jax_trainer.checkpoint.backend.process_group", ask)
    monkeypatch.setattr(ProcessGroup, "all_gather", ask)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.prepare(state(1))
    path = store.save(state(1), AT, {})
    _, saved = store.restore("latest", state(0))
    store.mark_resumed_from(saved)
    store.completed()
    assert (store.steps(), len(store.infos()), store.verify(path)) == ([1], 1, "")


def test_every_process_resumes_at_the_position_of_its_own_loader(reports):
    assert (reports.primary["position"], reports.other["position"]) == ({"drawn": [0, 5]}, {"drawn": [1, 5]})
    saved = CheckpointStore(reports.folder / "small").restore("latest", state(0))[1]
    with pytest.raises(DataError, match="2 processes, and 1 are running"):
        DataSource([np.zeros(3)], "train").restore(saved.position.state)
