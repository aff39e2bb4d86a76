import subprocess
import sys
from typing import Any

from jax_trainer.sharding.group import ProcessGroup
from tests.sharding.processes import pairs


def test_a_single_process_gets_its_own_values_without_waiting():
    alone = ProcessGroup(0, 1)
    assert alone.all_gather("topic", "value") == ["value"]
    assert alone.broadcast("topic", lambda: "value") == "value"
    alone.put("folder/name", "value")
    assert alone.get_all("folder") == {}


JOB = """
import os, sys
# the network library writes to standard output from several threads: discard that
sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
index, port = sys.argv[1:]
os.environ |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_PROCID": index}
os.environ |= {"SLURM_LOCALID": index, "SLURM_STEP_NUM_NODES": "1", "JAX_COORDINATOR_PORT": port}
from jax_trainer.sharding import join, process_group
from jax_trainer.sharding.group import ProcessGroupError
join(heartbeat=20)
group = process_group()
for number in range(3):
    print(group.all_gather("greeting", f"{group.index} sends {number}"))
print(group.broadcast("folder", lambda: "here" if group.is_primary else "never called"))
def fail():
    raise OSError("disk full")
try:
    group.broadcast("folder", fail)
except (OSError, ProcessGroupError) as error:
    print(type(error).__name__, error)
group.put(f"alive/{group.index}", "1")
group.put(f"alive/{group.index}", "2")
group.all_gather("written")
print(sorted(group.get_all("alive").items()))
if group.index == 0:
    try:
        group.all_gather("only process 0", timeout=0.5)
    except ProcessGroupError as error:
        print(error)
group.all_gather("end")
"""


def test_the_processes_of_a_slurm_job_find_each_other_exchange_values_in_order_and_fail_together():
    port, environment = pairs.free_port(), pairs.environment(1, JAX_PLATFORMS="cpu")
    commands = [[sys.executable, "-c", JOB, str(index), port] for index in (0, 1)]
    options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ended = pairs.ended([subprocess.Popen(command, **options) for command in commands])
    assert [one.code for one in ended] == [0, 0], "\n".join(one.err for one in ended)
    primary, other = map(pairs.lines, ended)
    expected = [f"['0 sends {number}', '1 sends {number}']" for number in range(3)]
    assert primary[:4] == other[:4] == [*expected, "here"]
    assert primary[4] == "OSError disk full"
    assert other[4].startswith("ProcessGroupError") and other[4].endswith("OSError: disk full")
    assert primary[5] == other[5] == "[('0', '2'), ('1', '2')]"
    assert "2 processes" in primary[6] and "'only process 0'" in primary[6]
