"""A Kubernetes manifest: an indexed Job with one pod per process, and the headless Service by which they meet."""

import json
import re
from pathlib import Path
from string import Template
from typing import Any

from jax_trainer.tools.launching import RESUMABLE, SAVE_SECONDS, Launch, LaunchError

PORT = 9876  # of the coordinator, in the pod with index 0
_TEMPLATE = Path(__file__).with_suffix(".yaml")
# NCCL and data workers need more than the 64 MiB that a container has
_SHARED = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}


def manifest(launch: Launch, *, image: str, volumes: tuple[str, ...] = ()) -> str:
    """The manifest as YAML, for `kubectl apply -f -`.

    Args:
        launch: what is trained, by how many processes.
        image: container image, with `jax-trainer` and what the experiment imports.
        volumes: persistent volume claims and where they are mounted, as `claim:/path`; the first is the working folder.
    """
    name, is_group, on_cpu = launch.job_name, launch.processes > 1, launch.platform == "cpu"
    claims = {f"claim-{number}": _claim(text) for number, text in enumerate(volumes)}
    words = launch.words("$(PROCESS)", f"{name}-0.{name}:{PORT}", resume=launch.restarts > 0)
    amounts: dict[str, Any] = {} if on_cpu else {"nvidia.com/gpu": launch.devices_per_process or 1}
    amounts |= {"cpu": launch.cpus_per_process} if launch.cpus_per_process else {}
    amounts |= {"memory": f"{launch.memory_per_process}G"} if launch.memory_per_process else {}
    mounts = [{"name": one, "mountPath": path} for one, (_, path) in claims.items()]
    values: dict[str, Any] = {
        "name": name,
        "port": PORT,
        "processes": launch.processes,
        "restarts": launch.restarts,
        "resumable": sorted(RESUMABLE),
        "subdomain": name if is_group else None,
        "save_seconds": SAVE_SECONDS,
        "time": launch.time,
        "image": image,
        "command": ["jax-trainer", *words, *(["--json"] if launch.json else [])],
        "platforms": "cpu" if on_cpu else "",
        "flags": f"--xla_force_host_platform_device_count={launch.devices_per_process or 1}" if on_cpu else "",
        "ports": [{"name": "coordinator", "containerPort": PORT}] if is_group else None,
        "resources": {"requests": amounts, "limits": amounts} if amounts else None,
        "folder": mounts[0]["mountPath"] if mounts else None,
        "mounts": [*mounts, {"name": _SHARED["name"], "mountPath": "/dev/shm"}],
        "volumes": [{"name": one, "persistentVolumeClaim": {"claimName": claim}} for one, (claim, _) in claims.items()]
        + [_SHARED],
    }
    # JSON is YAML, too
    text = Template(_TEMPLATE.read_text()).substitute({key: json.dumps(value) for key, value in values.items()})
    text = text if is_group else text.partition("---\n")[2]
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith((": null\n", 'value: ""}\n')))


def _claim(text: str) -> tuple[str, str]:
    if not (found := re.fullmatch(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(/[^:]+)", text)):
        raise LaunchError(f"A volume is claim:/path, such as data:/work, found {text[:80]!r}.")
    return found[1], found[3]
