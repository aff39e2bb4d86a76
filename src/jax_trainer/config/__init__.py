"""Reads YAML into typed configurations: strict parsing, references, includes, overrides, and errors with file and line.

A file cannot run code: `class_name` is looked up in registries, and only explicit imports register classes. Secrets
are redacted from everything that is written.
"""

from jax_trainer.config.describing import Described, Key, json_schema, keys_of, registered_classes
from jax_trainer.config.dumping import as_data, dump_config
from jax_trainer.config.files import ReadyConfig, config_path, ready_names
from jax_trainer.config.loading import (
    Loaded,
    UserCodeError,
    config_from,
    import_installed_projects,
    import_user_code,
    load_config,
)
from jax_trainer.config.problems import ConfigError, ConfigProblem, Location
from jax_trainer.config.redaction import redact, redact_text

__all__ = [
    "ConfigError",
    "ConfigProblem",
    "Described",
    "Key",
    "Loaded",
    "Location",
    "ReadyConfig",
    "UserCodeError",
    "as_data",
    "config_from",
    "config_path",
    "dump_config",
    "import_installed_projects",
    "import_user_code",
    "json_schema",
    "keys_of",
    "load_config",
    "ready_names",
    "redact",
    "redact_text",
    "registered_classes",
]
