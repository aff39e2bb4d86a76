"""`Experiment`: the contents of a YAML file, how it is built into a trainer with its data, and what a run stores."""

import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import jax
from compoconf import Registry
from jax.sharding import AxisType, Mesh

import jax_trainer.datasets.examples
import jax_trainer.models  # noqa: F401 - both register classes that a file can name
from jax_trainer.adapters import BaseModelFunction, BaseModelLinen, BaseModelNNX
from jax_trainer.checkpoint.folder import CONFIG, RunFolder
from jax_trainer.checkpoint.json_codec import decoded, encoded
from jax_trainer.config import Loaded, config_from, dump_config, load_config, redact
from jax_trainer.config.dumping import as_data
from jax_trainer.config.files import read_tree
from jax_trainer.config.problems import Node, Problems
from jax_trainer.config.registration import displaced, full_name, registered_name
from jax_trainer.config.settings import AtLeast, Problem, Settings, SettingsError, config_of, errors_of, expected, plain
from jax_trainer.core import Batch
from jax_trainer.datasets import DatasetModule
from jax_trainer.diagnostics.ledger import DATA, phase
from jax_trainer.diagnostics.suggestions import keywords_of
from jax_trainer.diagnostics.user_frame import noting
from jax_trainer.engine.costs import described_devices
from jax_trainer.logger.values import flat
from jax_trainer.optimizer import AlternatingOptimizerConfig, OptimizerInterface
from jax_trainer.runs import CallbacksLike, run_and_step
from jax_trainer.runs.sections import layout_for
from jax_trainer.sharding import LayoutError, make_mesh
from jax_trainer.trainer.base import BaseTrainer
from jax_trainer.trainer.eval_sets import EvalSetConfig, name_problems

LOG = logging.getLogger("jax_trainer")
HPARAMS = "hparams.json"
LONGEST = 4_000  # characters of an argument in `config.yaml`, which has at most 100,000


@dataclass
class StoredRun(Settings):
    """The stored configuration of a run. A run started in Python may lack the parts that were passed as objects.

    Args:
        trainer: how to train.
        model: the model to train.
        optimizer: the optimizer.
        optimizers: instead of `optimizer`, several by name, which update different parameters one after the other.
        dataset: the data to train on.
        eval_sets: further sets that are evaluated during training, by name; their metrics are `val_<name>/…`.
        seed: default seed of the trainer and the dataset.
        num_gpus: number of GPUs that share each batch, if the trainer has no `mesh`; without any GPU, the CPU is used.
        arguments: further arguments of a trainer whose class has an `__init__` of its own.
        not_stored: names of such arguments that a run does not store, because they are objects, secret or large.
    """

    trainer: BaseTrainer.cfgtype
    model: BaseModelNNX.cfgtype | BaseModelLinen.cfgtype | BaseModelFunction.cfgtype | None = None
    optimizer: OptimizerInterface.cfgtype | None = None
    optimizers: dict[str, AlternatingOptimizerConfig] = field(default_factory=dict)
    dataset: DatasetModule.cfgtype | None = None
    eval_sets: dict[str, EvalSetConfig] = field(default_factory=dict)
    seed: Annotated[int, AtLeast(0)] = 42
    num_gpus: Annotated[int, AtLeast(0)] = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    not_stored: tuple[str, ...] = ()

    def problems(self) -> Iterator[Problem]:
        """Reports two settings of the optimizer, and names of evaluation sets that are no names."""
        if self.optimizer is not None and self.optimizers:
            yield "optimizers", "`optimizer` and `optimizers` are both set. Leave out one of them."
        yield from name_problems(self.eval_sets)


@dataclass(kw_only=True)
class Experiment(StoredRun):
    """A complete experiment, as described by a file."""

    model: BaseModelNNX.cfgtype | BaseModelLinen.cfgtype | BaseModelFunction.cfgtype = field()
    dataset: DatasetModule.cfgtype = field()

    def problems(self) -> Iterator[Problem]:
        """Reports a missing optimizer, and two settings of it."""
        yield from super().problems()
        if self.optimizer is None and not self.optimizers:
            kinds = expected(OptimizerInterface.cfgtype)
            yield "optimizer", f"the key `optimizer` is missing: expected {kinds}; or `optimizers`, several by name."


def load_experiment(file: str | Path, overrides: Sequence[str] = ()) -> Loaded[Experiment]:
    """The experiment in a YAML file, with overrides such as `trainer.train_epochs=3`."""
    loaded = _loaded(file, Experiment, overrides)
    has_seed = loaded.tree.at("seed") is not None
    sets = {f"eval_sets.{name}.dataset": one.dataset for name, one in loaded.value.eval_sets.items()}
    for name, part in {"trainer": loaded.value.trainer, "dataset": loaded.value.dataset, **sets}.items():
        if has_seed and hasattr(part, "seed") and loaded.tree.at(f"{name}.seed") is None:
            part.seed = loaded.value.seed
    return loaded


def _loaded(file: str | Path, root: type[Any], overrides: Sequence[str], *, may_include: bool = True) -> Loaded[Any]:
    _register_optimizers()
    return load_config(file, root, overrides, may_include=may_include)


def _register_optimizers() -> None:
    from jax_trainer.optimizer import named  # noqa: F401 - registers 40 classes, which a trainer in Python need not wait for


def as_config(part: str, value: Any) -> Any:
    """`value`; if it has the keys of a model or an optimizer as in a file, its configuration."""
    if not (isinstance(value, Mapping) and "class_name" in value):
        return value
    _register_optimizers()
    return getattr(config_from({part: value}, _Parts), part)


@dataclass
class _Parts(Settings):
    """The parts of a trainer that may be written as in a file."""

    model: BaseModelNNX.cfgtype | BaseModelLinen.cfgtype | BaseModelFunction.cfgtype | None = None
    optimizer: OptimizerInterface.cfgtype | None = None


def stored_run(folder: RunFolder, overrides: Sequence[str] = ()) -> Loaded[StoredRun]:
    """The stored configuration of a run. Its classes must be registered: nothing is imported.

    The folder may be untrusted, and is written without includes: includes are not read.
    """
    style = read_tree(folder.config_file, (), Problems(), may_include=False).at("style")
    if style is not None and not style.is_section:
        text = f"{folder.path} is a run of `{style.data()}`, started in Python. Resume it there: "
        raise SettingsError([("style", f"{text}`{style.data()}(…, resume={str(folder.path)!r})`.")])
    loaded = _loaded(folder.config_file, StoredRun, overrides, may_include=False)
    for path, node in _class_names(loaded.tree, ""):
        # an override has no line: a person may mean another class
        if node.location.line and isinstance(node.value, str) and (ours := displaced(node.value)) is not None:
            text = f"this run was trained with {full_name(ours)}, but another class has this name. Do not import it."
            raise loaded.error(SettingsError([(path, text)]))
    return loaded


def _class_names(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Every `class_name` in a file, with its dotted key."""
    for name, child in node.children():
        below = f"{path}.{name}".lstrip(".")
        yield from [(below, child)] if name == "class_name" else _class_names(child, below)


def trainer_class(run: StoredRun) -> type[Any]:
    """The class that the `trainer` section names."""
    return Registry.get_class(BaseTrainer, run.trainer.class_name)  # type: ignore[arg-type]  # compoconf annotates an instance


def build(
    run: StoredRun,
    *,
    exmp_input: Batch | None = None,
    dataset: DatasetModule | None = None,
    folder: RunFolder | None = None,
    kind: type[Any] | None = None,
    model: Any = None,
    optimizer: Any = None,
    callbacks: CallbacksLike = (),
    own: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Builds the trainer of an experiment or of a stored run, and loads its dataset, if it has one.

    Args:
        run: all configurations.
        exmp_input: an example batch; default: the first one of the dataset.
        dataset: instead of the configured one.
        folder: the folder of an existing run.
        kind: the trainer's class, instead of the configured one.
        model, optimizer: for a run that has none, because they were passed in Python.
        callbacks: callbacks besides the configured ones.
        own: further arguments of a class with a custom `__init__`, instead of the stored ones.
        mesh: instead of the configured one, which must be removed from `run`; see `described_mesh`.
    """
    mesh, make = _mesh(run) if mesh is None else mesh, kind or trainer_class(run)  # before the data is loaded
    source = getattr(run.trainer, "initial_weights", None)  # a user's trainer may have a configuration of its own
    # the base of LoRA is not in the checkpoints of a run
    if source is not None and (folder is None or getattr(run.trainer, "lora", None) is not None):
        with errors_of("trainer.init_from", OSError, ValueError):
            run_and_step(Path(source.path))
    for name, part in {"model": model, "optimizer": optimizer}.items():
        if part is not None and (getattr(run, name) is not None or (name == "optimizer" and run.optimizers)):
            raise _problem(name, f"This run has a stored {name}: leave out `{name}`, or use an override to change it.")
    if dataset is None and run.dataset is not None:
        with phase(DATA):
            dataset = made_dataset(run.dataset)
    if exmp_input is None and dataset is not None:
        with phase(DATA):
            exmp_input = dataset.example()
    others: dict[str, Any] = {"seed": run.seed, "num_gpus": run.num_gpus}
    others |= {"eval_sets": run.eval_sets} if run.eval_sets else {}
    options: dict[str, Any] = {"config": run.trainer, "model_config": run.model}
    options["optimizer_config"] = run.optimizers or run.optimizer
    options |= {"exmp_input": exmp_input, "mesh": mesh, "model": model, "optimizer": optimizer, "dataset": dataset}
    options |= {"callbacks": callbacks or None, "other_configs": others, "folder": folder}
    stored = {name: value for name, value in options.items() if value is not None}
    return _constructed(make, stored, _own_arguments(make, run, own or {}))


def described_mesh(run: StoredRun, count: int) -> Mesh:
    """The mesh that `run` would have with `count` devices, which need not exist; takes it out of the configuration.

    Without a configured mesh, all devices share each batch.
    """
    # without effect if JAX has been used; then its devices may still be enough
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    sizes = {} if run.trainer.mesh is None else run.trainer.mesh.sizes
    with errors_of("trainer.mesh", LayoutError):
        mesh = make_mesh(**sizes, devices=described_devices(count))
    run.trainer.mesh = None
    return mesh


def rebuilt(caller: type[Any], checkpoint: Path, overrides: Sequence[str], **parts: Any) -> tuple[Any, int | None]:
    """The trainer of a run, without its weights, and the step of `checkpoint`, if that is not the run folder.

    Args:
        caller: the class whose `load_from_checkpoint` is called: the class of the run, or a base class of it.
        checkpoint: the run folder, or the folder of one of its checkpoints.
        overrides: of the stored configuration.
        parts: see `build`.
    """
    folder, step = run_and_step(checkpoint)
    run = stored_run(folder, overrides).value
    kind = trainer_class(run)
    if kind is stored_as(caller):
        kind = caller
    elif not issubclass(kind, caller):
        raise TypeError(f"{folder.path} is a run of {kind.__name__}, not of {caller.__name__}.")
    return build(run, folder=folder, kind=kind, **parts), step


def _own_arguments(kind: type[Any], run: StoredRun, own: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the constructor of a trainer's class, besides those of `TrainerModule`."""
    if unstored := [name for name in run.not_stored if name not in own]:
        text = f"The argument `{unstored[0]}` of this run is an object, secret or large, and not stored: pass "
        raise _problem("not_stored", f"{text}`{unstored[0]}` again.")
    keys = own.keys() & set(keywords_of(config_of(kind)) or ()) - inspect.signature(kind).parameters.keys()
    if keys:
        text = f"`{min(keys)}` is a key of the stored configuration. Change it there: "
        raise TypeError(f"{text}`overrides=['trainer.{min(keys)}={own[min(keys)]}']`.")
    return {**decoded(run.arguments), **own}


def _constructed(kind: type[Any], stored: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Creates a `kind`. What is `stored` does not depend on what its `__init__` passes on: `TrainerModule` uses it."""
    signature = inspect.signature(kind)
    passed = {name: value for name, value in stored.items() if name in signature.parameters} | dict(own)
    try:
        signature.bind(**passed)
    except TypeError as error:
        text = f"`{kind.__name__}` cannot be created with the arguments of this run: {error}. It has {signature}: pass "
        raise TypeError(f"{text}what it lacks to `load_from_checkpoint(…)`.") from None
    trainer: Any = BaseTrainer.__new__(kind, **passed)
    vars(trainer)["_stored"] = stored
    with (
        noting(f"The run has the arguments {', '.join(own)}. Load it with the class that has them.")
        if own
        else nullcontext()
    ):
        trainer.__init__(**passed)
    return trainer


def made_dataset(config: Any) -> DatasetModule:
    """The configured dataset of an experiment."""
    with errors_of("dataset"):
        return config.instantiate(DatasetModule)


def _mesh(run: StoredRun) -> Mesh | None:
    """The mesh of the GPUs that share each batch; None: the trainer's default."""
    count, layout = run.num_gpus, layout_for(run.trainer, None)
    if run.trainer.mesh is not None or layout is not None:
        found = 1 if layout is None else layout.mesh.size
        if count > 1 and count != found:
            text = f"`num_gpus` is {count}, but `trainer.mesh` has {found} devices. Leave out `num_gpus`."
            raise _problem("num_gpus", text)
        return None
    gpus = [device for device in jax.devices() if device.platform != "cpu"]
    if count > max(1, len(gpus)):
        text = f"`num_gpus` is {count}, but JAX finds {len(gpus)}. Use 1 to train on one device, or on the CPU."
        raise _problem("num_gpus", text)
    if count == 0 and gpus:
        raise _problem("num_gpus", "`num_gpus` is 0, but JAX uses a GPU. Set JAX_PLATFORMS=cpu to train on the CPU.")
    if count == 1 and not gpus:
        LOG.info("`num_gpus` is 1, but JAX finds no GPU: training on the CPU.")
    return jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=gpus[:count]) if count > 1 else None


def _problem(key: str, text: str) -> SettingsError:
    return SettingsError([(key, text)])


# what a run stores


def configs_of(
    kind: type[Any], config: Any, model: Any, optimizer: Any, dataset: DatasetModule | None, others: Mapping[str, Any]
) -> dict[str, Any]:
    """All configurations of a trainer of class `kind`, as stored with its runs; objects passed in Python have none."""
    stored = {"trainer": _of_class(config, registered_name(stored_as(kind), BaseTrainer) or "")}
    key = "optimizers" if isinstance(optimizer, Mapping) else "optimizer"
    stored |= {name: one for name, one in {"model": model, key: optimizer}.items() if one is not None}
    if dataset is not None and (name := registered_name(type(dataset), DatasetModule)):
        stored["dataset"] = _of_class(dataset.config, name)
    return {**stored, **others}


def stored_files(configs: Mapping[str, Any]) -> dict[str, Any]:
    """What a run stores of them: `config.yaml`, from which it can be rebuilt, and all values by their dotted key.

    The latter, without secrets, are its `hparams` and the file `hparams.json`.
    """
    hparams = flat(redact(as_data(configs)))
    files = {CONFIG: dump_config(configs), HPARAMS: json.dumps(hparams, indent=1) + "\n"}
    return {"files": files, "hparams": hparams}


def recorded(kind: type[Any], base: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, as a run stores them: short plain data without secrets; of all others the names.

    Those of `base`, and keys of the configuration, are stored elsewhere, or passed again.
    """
    signature, of_base = inspect.signature(kind), inspect.signature(base).parameters
    bound, parameters = signature.bind(*args, **kwargs), signature.parameters
    bound.apply_defaults()
    elsewhere, own = {*of_base, *(keywords_of(config_of(kind)) or ())}, {}
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            own |= {other: one for other, one in value.items() if other not in elsewhere}
        elif parameters[name].kind is not inspect.Parameter.VAR_POSITIONAL:
            # text under one of our names is not our argument: `model="resnet18"`
            own |= {name: value} if name not in of_base or isinstance(value, str) else {}
    stored: dict[str, Any] = {}
    for name, value in own.items():
        with suppress(ValueError):  # an object, or a key that a file cannot have
            data = {name: encoded(plain(value))}
            stored |= data if redact(data) == data and len(dump_config(data)) <= LONGEST else {}
    is_default = lambda name: name in parameters and own[name] is parameters[name].default
    parts = {"arguments": stored, "not_stored": [name for name in own if name not in stored and not is_default(name)]}
    return {name: part for name, part in parts.items() if part}


def stored_as(kind: type[Any]) -> type[Any]:
    """The registered class under which runs of a trainer are stored: itself, or its closest registered base."""
    return next(base for base in kind.__mro__ if registered_name(base, BaseTrainer))


def storable(other_configs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `other_configs`; refuses keys that a stored run cannot have."""
    own = {"trainer", "model", "optimizer", "optimizers", "arguments", "not_stored"}
    known = {field.name for field in fields(StoredRun) if field.init} - own
    if unknown := sorted(other_configs.keys() - known):
        raise ValueError(
            f"`other_configs` has unknown keys: {', '.join(unknown)}. Its keys: {', '.join(sorted(known))}."
        )
    return dict(other_configs)


def _of_class(config: Any, name: str) -> Any:
    """`config` with the name of its class: several classes may share a configuration class."""
    named = copy(config)
    named.class_name = name
    return named
