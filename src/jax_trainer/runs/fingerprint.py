"""The fingerprint of a run: what it computes, in parts that are compared one by one, and written to `run.json`.

| part | what it is | compared by |
|---|---|---|
| program | model, loss and options | the equations of the training step, with all constants |
| optimizer | the update, and the state that it starts with | the equations of both |
| callbacks | those that change the training | their settings |
| start | the initial weights and the random key | the equations of the initialisation, digests of existing arrays |
| data | all data sets, and the order of their batches | sizes, seeds, digests of their contents |
| schedule | how long, when to evaluate | never a reason for another run |

Everything else (logging, progress, prefetching, metrics, callbacks that only observe) is not in it, because it changes
no bit. The user's words (keys of the file, arguments) do not decide either: they describe what differs.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_trainer.callbacks import Callback
from jax_trainer.config.registration import implementation_of
from jax_trainer.config.settings import checked
from jax_trainer.core import Batch, CompiledProgram
from jax_trainer.core.equations import Traced
from jax_trainer.core.random import key_data
from jax_trainer.datasets import Data, DataSource
from jax_trainer.datasets.contents import FIRST_BATCH, content_of, is_reproducible, value_name
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.user_frame import describe_shapes
from jax_trainer.engine import Plan
from jax_trainer.engine.processes import peers
from jax_trainer.logger.values import flat
from jax_trainer.optimizer.description import described_optimizer, learning_rates_in, rates_at

PARTS = ("program", "optimizer", "callbacks", "start", "data")  # which decide, and which `allow_changes` may name
_FLAGS = ("jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable", "jax_enable_x64")
_NAMES = ("model", "loss_fn", "eval_step")  # words that are names in the code, which may change
_LENGTHS = ("epochs", "steps", "seconds", "total_steps")  # in the schedule
_MOST_WORDS, _MAX_WORD = 4, 60  # of a part that a message lists; characters of a value
# the part that a word belongs to; all others belong to the program
_WORDS_OF = {
    "data": re.compile(r"^(dataset|eval_sets|batch_size|steps_per_epoch)\b|max_steps_per_epoch$|overfit_batches$"),
    "optimizer": re.compile(r"^optimizers?\b|\bclip_(norm|adaptive)$"),
    "start": re.compile(r"(^|\.)(seed|init_from\b.*)$"),
    "callbacks": re.compile(r"^(trainer\.)?callbacks\b"),
    "schedule": re.compile(r"(^|\.)(num_epochs|train_epochs|max_(steps|time)|n_steps|eval_freq|\w*every_n_\w*)$"),
    "surroundings": re.compile(
        r"(^|\.)(logger|hparams|metrics|mesh|sharding|tensorboard)\b|(^|\.)(log_\w+|limit_\w+|\w+_log_modes|progress\w*|style"
        r"|enable_progress_bar|metric|mode|max_rollbacks|resident|debug"
        r"|prefetch\w*|steps_per_call|compilation_cache|val_at_start|eval_step|num_gpus|seed_eval)$"
    ),
}
Facts = Mapping[str, Any]
FORMAT = 2
_Section, _Sections = dict[str, Any], dict[str, dict[str, Any]]
_HINTS = {"format": int, "step": str, "callbacks": _Sections, "data": _Sections}
_HINTS |= dict.fromkeys(("made_by", "program", "optimizer", "start", "schedule", "words"), _Section)


def facts_in(record: Mapping[str, Any]) -> Facts | None:
    """The facts in the content of `run.json`; None if it has none, or other ones."""
    try:
        facts = checked(record.get("fingerprint"), _HINTS)
    except ValueError:
        return None
    has_all = {"equations", "parameters"} <= facts["program"].keys() and "equations" in facts["optimizer"]
    return facts if facts["format"] == FORMAT and has_all and "total_steps" in facts["schedule"] else None


class Difference(NamedTuple):
    """A part that differs from that of an earlier run, and how, as text."""

    part: str
    text: str

    def __str__(self) -> str:
        return self.text if self.text.startswith(self.part) else f"{self.part}: {self.text}"


def merged(found: Collection[Difference]) -> list[Difference]:
    """One difference for each part.

    >>> merged([Difference("data", "other labels"), Difference("data", "other labels in 'val'")])
    [Difference(part='data', text="other labels, other labels in 'val'")]
    """
    parts = dict.fromkeys(one.part for one in found)
    return [Difference(part, ", ".join(one.text for one in found if one.part == part)) for part in parts]


class Comparison(NamedTuple):
    """What differs from an earlier run.

    Attributes:
        differences: of the parts that decide whether it is the same run.
        schedule: what changes of its schedule, as text.
        is_rescheduled: whether a step computes something else only because the length of the run differs.
        note: what could not be compared; "" if all was.
    """

    differences: list[Difference]
    schedule: str
    is_rescheduled: bool
    note: str

    def without(self, allowed: Collection[str]) -> list[Difference]:
        """The differences in other parts than these."""
        return [one for one in self.differences if one.part not in allowed]


@dataclass(frozen=True)
class Fingerprint:
    """What a run computes; `facts` are its parts as plain data.

    Args:
        facts: the parts by name.
        program: the compiled program.
        step: the equations of a training step.
        data: the data sets by name.
        with_length: the fingerprint with the program for another number of optimizer updates.
    """

    facts: Facts
    program: CompiledProgram
    step: Traced
    data: Mapping[str, Any]
    with_length: Callable[[int | None], "Fingerprint"] = field(repr=False)

    @classmethod
    def of(
        cls,
        program: CompiledProgram,
        data: Data,
        plan: Plan,
        *,
        tests: Mapping[str, Any] | None = None,
        example: Batch | None = None,
        first: Mapping[str, Any] | None = None,
        words: Mapping[str, Any] | None = None,
        callbacks: Mapping[str, Any] | None = None,
        starts_from: str | None = "",
        total_steps: int | None = None,
        rebuild: Callable[[int | None], CompiledProgram] | None = None,
    ) -> "Fingerprint":
        """The fingerprint of a run that has not started.

        Args:
            program: the program, traced by `train_shapes`.
            data, plan, tests: those of the run.
            example: a batch of the training, if the program was traced with another one; None: it was traced with it.
            first: first batches of data sets that were read already, by name.
            words: the user's arguments or configuration.
            callbacks: callbacks or their configurations, by name.
            starts_from: a digest of the weights that the run starts from, "" if the program determines them, None if
                they are unknown: it resumes, or they are not there any more.
            total_steps: the number of optimizer updates that schedules were built for.
            rebuild: builds the program for another number of them, traced, too; None: it depends on none.
        """
        sets = {"train": data.train, **data.evals, **(tests or {})}
        known, reads = first or {}, not peers().is_multi_process
        contents = {name: content_of(one, known.get(name), reads=reads) for name, one in sets.items()}
        limits = ("steps_per_epoch", "overfit_batches", "fast_dev_run")
        contents["limits"] = {name: getattr(plan, name) for name in limits}
        epochs, steps = plan.ends_at(DataSource(data.train, "train").lengths)
        every = plan.resolved().eval_every
        schedule = dict(zip(_LENGTHS, (epochs, steps, plan.max_seconds, total_steps), strict=True))
        schedule |= {"evaluation_epochs": every.epochs, "evaluation_steps": every.steps}
        tx, known_words = program.info.tx, flat(dict(words or {}))
        is_described = tx is not None and not any(name.startswith("optimizer") for name in known_words)
        others = {
            "callbacks": {name: _described_callback(one) for name, one in (callbacks or {}).items()},
            "data": contents,
            "schedule": schedule,
        }

        @cache
        def with_length(steps: int | None) -> Fingerprint:
            built = program
            if rebuild is not None and steps != total_steps:
                with suppress(ValueError):  # it cannot have that length: it is another one
                    built = rebuild(steps)
            step, parts = _program_parts(built, example, starts_from)
            of_optimizer = flat({"optimizer": described_optimizer(tx, steps)}) if is_described else {}
            facts = {"format": FORMAT, **parts, **others, "words": {**known_words, **of_optimizer}}
            return cls(facts, built, step, sets, with_length)

        return with_length(total_steps)

    def with_start(self, **facts: Any) -> "Fingerprint":
        """The fingerprint of a run with other facts of its start; None: they are unknown."""
        return replace(self, facts={**self.facts, "start": {**self.facts["start"], **facts}})

    def resuming(self, before: Facts | None) -> Facts:
        """The facts of a run that resumes one with the facts `before`, which knows how that one has started."""
        known = {part: dict((before or {}).get(part, {})) for part in ("start", "optimizer")}
        for part, one in known.items():
            one |= {name: now for name, now in self.facts[part].items() if now is not None or name not in one}
        return {**self.facts, **known}

    def compared(self, before: Facts, edited_by: Callable[[], Collection[str]] = tuple) -> Comparison:
        """What differs from an earlier run with these facts.

        `edited_by` returns the names of the classes of callbacks that have changed its state.
        """
        last, is_same = before["schedule"]["total_steps"], before["step"] == self.facts["step"]
        other = [*_changes(before["made_by"], self.facts["made_by"])]
        as_before = self if is_same or other else self.with_length(last)  # as the schedules were built then
        found = [*(self._known_words(before) if other else as_before._program_differences(before))]
        changed = _known_changes(before["start"], self.facts["start"]) - ({"weights"} if other else set())
        words = self._words(before, "start")
        if "key" in changed or words:
            found += [Difference("start", words or "another random key")] if changed else []
        if changed - {"key"} and "init_from" not in words:
            found.append(Difference("start", "other initial weights"))
        found += [*self._callback_differences(before, edited_by), *self._data_differences(before)]
        note = f"The training step cannot be compared ({', '.join(other)}), only what was passed." if other else ""
        schedule = ", ".join(_changes(before["schedule"], self.facts["schedule"], skip=("total_steps",)))
        schedule = (self._words(before, "schedule") or schedule) if schedule else ""
        return Comparison(merged(found), schedule, as_before.facts["step"] != self.facts["step"], note)

    def rate_changes(self, before: Facts, step: int) -> tuple[str, str]:
        """What becomes of the learning rates if the run resumes at `step` with another length: in the past, and now.

        The first text is empty if all updates so far had the learning rates that they would have now.
        """
        last = before["schedule"]["total_steps"]
        as_before = self.with_length(last)
        old, new = (learning_rates_in(one.program.info.tx) for one in (as_before, self))
        if not new or old.keys() != new.keys() or as_before.facts["program"] != self.facts["program"]:
            return f"a step depends on the length of the run, which was {last} updates", ""
        changes = []
        for name in new:
            a, b = (rates_at(one[name], range(step + 1)) for one in (old, new))
            past = np.flatnonzero(a[:step] != b[:step])
            if past.size:
                at = past[past.size // 2]
                now = self.facts["schedule"]["total_steps"]
                return f"{name} at step {at} is {a[at]:.4g} over {last} updates, and {b[at]:.4g} over {now}", ""
            changes += [f"{name} at step {step}: {a[step]:.4g} → {b[step]:.4g}"] if a[step] != b[step] else []
        return "", ", ".join(changes)

    def _program_differences(self, before: Facts) -> Iterator[Difference]:
        now = self.facts
        changed = [*_changes(before["program"], now["program"], skip=("equations", "parameters"))]
        words, passed = self._words(before, "optimizer"), self._words(before, "optimizer", of_both=True)
        # a restored state has what it started with, such as a learning rate: then what was passed decides
        is_unknown = now["optimizer"]["start"] is None
        of_optimizer = bool(_known_changes(before["optimizer"], now["optimizer"]) or (is_unknown and passed))
        renamed = _renamed(before["program"], now["program"], "parameters")
        if not words and renamed:
            of_optimizer = False  # it follows from other parameters
        if before["step"] == now["step"] and not (of_optimizer or changed):
            if renamed:  # the same equations, and a checkpoint of one does not fit the other
                yield Difference("program", self._words(before, "program") or f"parameters: {renamed}")
            return
        is_other = not of_optimizer or changed or before["program"] != now["program"]
        if is_other:
            where = (
                self.step.difference(before["program"]["equations"], update=False)
                or "an array constant, or how its values are connected"
            )
            text = self._words(before, "program") or ", ".join(changed) or passed
            yield Difference("program", text or f"the training step differs in {where}")
        if of_optimizer:
            where = self.step.difference(before["optimizer"]["equations"], update=True)
            state = _renamed(before["optimizer"], now["optimizer"], "state")
            if words or where or state or not is_other:  # otherwise only the state of the program has more
                yield Difference("optimizer", words or f"the update differs in {where or f'its state: {state}'}")

    def _callback_differences(self, before: Facts, edited_by: Callable[[], Collection[str]]) -> Iterator[Difference]:
        for name, old, new in _pairs(before["callbacks"], self.facts["callbacks"]):
            one = new if old is None else old
            seen = ()
            if one.get("changes_training") and "monitor" in one:  # it decides by the metrics of evaluations
                seen = _changes(before["schedule"], self.facts["schedule"], skip=(*_LENGTHS,))
            changed = [*_changes(old or {}, new or {}, prefix=f"{name}."), *seen]
            if changed and (one.get("changes_training") or one.get("class") in edited_by()):
                text = f"new: {name}" if old is None else f"without {name}" if new is None else ", ".join(changed)
                yield Difference("callbacks", text)

    def _data_differences(self, before: Facts) -> Iterator[Difference]:
        has_other_parts = before["made_by"].get("processes") != self.facts["made_by"]["processes"]
        for name, old, new in _pairs(before["data"], self.facts["data"]):
            if old is None or new is None:
                yield Difference("data", f"new: {name!r}" if old is None else f"without {name!r}")
                continue
            unknown = old.keys() ^ new.keys()  # of other kinds of data
            changed = [*_changes(old, new, skip=("digests", "kind", *unknown), prefix=f"{name}.")]
            a, b = old.get("digests", {}), new.get("digests", {})
            values = [one for one in a if one in b and a[one] != b[one]]
            of_first = {one: digest for one, digest in b.items() if one.startswith(FIRST_BATCH)}
            is_random = not changed and of_first.keys() & values and not is_reproducible(self.data[name], of_first)
            if is_random or changed or has_other_parts:  # otherwise it tells nothing, or nothing new
                values = [one for one in values if one not in of_first]
            changed += [f"other {value_name(one, b)}{'' if name == 'train' else f' in {name!r}'}" for one in values]
            if changed:
                yield Difference("data", ", ".join(dict.fromkeys(changed)))

    def _known_words(self, before: Facts) -> Iterator[Difference]:
        """What was passed to both runs and differs: it decides where the equations cannot be compared."""
        for part in ("program", "optimizer"):
            if text := self._words(before, part, of_both=True):
                yield Difference(part, text)

    def _words(self, before: Facts, part: str, *, of_both: bool = False) -> str:
        """The user's words of a part that differ."""
        of = lambda name: next((of for of, words in _WORDS_OF.items() if words.search(name)), "program")
        both = (before["words"], self.facts["words"])
        words = [{name: one for name, one in words.items() if of(name) == part} for words in both]
        changed = [*_changes(*words, skip={*_NAMES, *(words[0].keys() ^ words[1].keys())} if of_both else ())]
        more = f" and {len(changed) - _MOST_WORDS} more" if len(changed) > _MOST_WORDS else ""
        return ", ".join(changed[:_MOST_WORDS]) + more


def _program_parts(
    program: CompiledProgram, example: Batch | None, starts_from: str | None
) -> tuple[Traced, dict[str, Any]]:
    """The equations of a training step, and the facts that depend on the program."""
    key, traced, state = program.traced
    example = traced if example is None else example
    equations = program.equations(example)
    flags = {name: value for name in _FLAGS if (value := getattr(jax.config, name, None)) is not None}
    micro, knows = program.info.micro_batches, starts_from is not None
    return equations.step, {
        "made_by": {"jax": jax.__version__, "platform": jax.default_backend(), "processes": jax.process_count()},
        "step": equations.step.digest,
        "program": {
            "equations": equations.step.text(update=False),
            "parameters": [*_names(state.params), *_names(state.model_state)],
            "batch": describe_shapes(example),
            "accumulate": None if micro is None else {str(epoch): count for epoch, count in micro.items()},
            **flags,
        },
        "optimizer": {
            "equations": equations.step.text(update=True),
            "start": equations.optimizer.digest if knows else None,
            "state": _names(state.opt_state),
        },
        "start": {
            "weights": equations.weights.digest if knows else None,
            "arrays": equations.weights.constants if knows else None,
            "from": starts_from,
            "key": np.asarray(key_data(key() if callable(key) else key)).tolist(),
        },
    }


def _names(tree: Any) -> list[str]:
    """The path and shape of every array: what equations that compute the same are called in a checkpoint."""
    return [f"{leaf_path(path)} {list(leaf.shape)}" for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _renamed(before: Facts, now: Facts, name: str) -> str:
    """The first array of another name or shape; "" if there is none."""
    pairs = zip_longest(before[name], now[name], fillvalue="none")
    return next((f"{old} → {new}" for old, new in pairs if old != new), "")


def _described_callback(callback: Any) -> dict[str, Any]:
    """The settings of a callback, or of its configuration, and whether they change what is trained."""
    config = callback.config if isinstance(callback, Callback) else callback
    kind = type(callback) if isinstance(callback, Callback) else implementation_of(callback)
    own = {name: one for name, one in vars(callback).items() if name[:1] != "_"} if kind is type(callback) else {}
    values = flat(asdict(config)) if is_dataclass(config) and not isinstance(config, type) else {}
    plain = {name: one for name, one in {**own, **values}.items() if isinstance(one, bool | int | float | str)}
    name, changes = getattr(kind, "__name__", ""), getattr(kind, "changes_training", False)
    return {"class": name, "changes_training": changes, **plain}


def _known_changes(before: Facts, now: Facts) -> set[str]:
    """The names of the values that differ; None is unknown."""
    return {name for name, old, new in _pairs(before, now) if old != new and None not in (old, new)}


def _pairs(before: Facts, now: Facts) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*before, *now)):
        yield name, before.get(name), now.get(name)


def _changes(before: Facts, now: Facts, *, skip: Collection[str] = (), prefix: str = "") -> Iterator[str]:
    """The values that differ, as text."""
    for name, old, new in _pairs(before, now):
        if old != new and name not in skip:
            yield f"{prefix}{name}: {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_WORD else f"{text[:_MAX_WORD]}…"
