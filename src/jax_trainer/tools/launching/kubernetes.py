"""A Kubernetes manifest: an indexed Job with one pod per process, and the headless Service by which they meet."""

import re
from typing import Any

import yaml

from jax_trainer.tools.launching.job import RESUMABLE, SAVE_SECONDS, Launch, LaunchError

PORT = 9876  # of the coordinator, in the pod with index 0
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def manifest(launch: Launch, *, image: str, volumes: tuple[str, ...] = ()) -> str:
    """The manifest as YAML, for `kubectl apply -f -`.

    Args:
        launch: what is trained, by how many processes.
        image: container image, with `jax-trainer` and what the experiment imports.
        volumes: persistent volume claims and where they are mounted, as `claim:/path`; the first is the working folder.
    """
    services = [_service(launch)] if launch.processes > 1 else []
    job = _job(launch, image, [_claim(text) for text in volumes])
    return yaml.safe_dump_all([*services, job], sort_keys=False, width=120)


def _claim(text: str) -> tuple[str, str]:
    if not (found := re.fullmatch(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(/[^:]+)", text)):
        raise LaunchError(f"A volume is claim:/path, such as data:/work, found {text[:80]!r}.")
    return found[1], found[3]


def _service(launch: Launch) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",  # a name for each pod, and no address of its own
        "publishNotReadyAddresses": True,  # the processes look for each other before any of them is ready
        "selector": {"batch.kubernetes.io/job-name": launch.job_name},
        "ports": [{"name": "coordinator", "port": PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": launch.job_name}, "spec": spec}


def _job(launch: Launch, image: str, claims: list[tuple[str, str]]) -> dict[str, Any]:
    # other codes are errors of the program or of its configuration, which would come back
    fails = {"operator": "NotIn", "containerName": "train", "values": sorted(RESUMABLE)}
    spec = {
        "completionMode": "Indexed",
        "completions": launch.processes,
        "parallelism": launch.processes,
        # all processes of a run restart together: each index fails once for each of them
        "backoffLimitPerIndex": launch.restarts,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": fails}]},
        "template": {"spec": _pod(launch, image, claims)},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": launch.job_name}, "spec": spec}


def _pod(launch: Launch, image: str, claims: list[tuple[str, str]]) -> dict[str, Any]:
    name = launch.job_name
    words = launch.words("$(PROCESS)", f"{name}-0.{name}:{PORT}", resume=launch.restarts > 0)
    mounts = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(claims)]
    container = {
        "name": "train",
        "image": image,
        "command": ["jax-trainer", *words, *(["--json"] if launch.json else [])],
        "env": [{"name": "PROCESS", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}, *_variables(launch)],
        "resources": _resources(launch),
        "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
        **({"workingDir": claims[0][1]} if claims else {}),
        **({"ports": [{"name": "coordinator", "containerPort": PORT}]} if launch.processes > 1 else {}),
    }
    volumes: list[dict[str, Any]] = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(claims)
    ]
    return {
        **({"subdomain": name} if launch.processes > 1 else {}),
        "restartPolicy": "Never",  # the Job replaces a pod, by its exit code
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        **({"activeDeadlineSeconds": launch.time} if launch.time else {}),
        "containers": [container],
        # NCCL and data workers need more than the 64 MiB that a container has
        "volumes": [*volumes, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def _variables(launch: Launch) -> list[dict[str, str]]:
    if launch.platform != "cpu":
        return []
    flags = f"--xla_force_host_platform_device_count={launch.devices_per_process or 1}"
    return [{"name": "JAX_PLATFORMS", "value": "cpu"}, {"name": "XLA_FLAGS", "value": flags}]


def _resources(launch: Launch) -> dict[str, Any]:
    amounts: dict[str, Any] = {"nvidia.com/gpu": launch.devices_per_process or 1} if launch.platform != "cpu" else {}
    amounts |= {"cpu": launch.cpus_per_process} if launch.cpus_per_process else {}
    amounts |= {"memory": f"{launch.memory_per_process}G"} if launch.memory_per_process else {}
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}
