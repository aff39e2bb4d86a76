import pairs

from jax_trainer.processes import ProcessGroup


def test_a_process_alone_talks_to_itself_and_waits_for_nobody():
    alone = ProcessGroup(0, 1)
    assert alone.all_gather("topic", "word") == ["word"]
    assert alone.broadcast("topic", lambda: "word") == "word"
    alone.put("folder/name", "word")
    assert alone.notes("folder") == {}


JOB = """
from jax_trainer.processes import ProcessGroupError, peers
us = peers()
for number in range(3):
    print(us.everyones("greeting", f"{us.index} says {number}"))
print(us.from_lead("place", lambda: "here" if us.is_primary else "nobody asks me"))
def fail():
    raise OSError("no room")
try:
    us.from_lead("place", fail)
except (OSError, ProcessGroupError) as error:
    print(type(error).__name__, error)
us.put(f"alive/{us.index}", "1")
us.put(f"alive/{us.index}", "2")
us.everyones("written")
print(sorted(us.notes("alive").items()))
if us.index == 0:
    try:
        us.everyones("nobody else comes", patience=0.5)
    except ProcessGroupError as error:
        print(error)
us.everyones("end")
"""


def test_processes_tell_each_other_words_in_order_and_fail_together():
    lead, other = (pairs.lines(one) for one in pairs.run(JOB))
    said = [f"['0 says {number}', '1 says {number}']" for number in range(3)]
    assert lead[:4] == other[:4] == [*said, "here"]
    assert lead[4] == "OSError no room"
    assert other[4] == "ProcessGroupError The first process could not go on: OSError: no room"
    assert lead[5] == other[5] == "[('0', '2'), ('1', '2')]"
    assert lead[6].startswith("Not all of the 2 processes came as far as 'nobody else comes'")
