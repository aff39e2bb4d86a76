"""The Kubernetes manifest, against the schemas that Kubernetes publishes, and what our processes rely on in it."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_trainer.tools.launching import RESUMABLE, Launch, LaunchError
from jax_trainer.tools.launching.kubernetes import manifest

VERSION = "1.33"  # the first with a stable backoffLimitPerIndex


def documents(launch: Launch, **options: Any) -> dict[str, Any]:
    """The documents of a manifest by kind, each valid."""
    made = list(yaml.safe_load_all(manifest(launch, image="train:1", **options)))
    for one in made:
        kubernetes_validate.validate(one, VERSION, strict=True)
    return {one["kind"]: one for one in made}


def launches(**fixed: Any) -> Any:
    some = st.none() | st.integers(1, 64)
    numbers = {name: st.integers(1, 16) for name in ("nodes", "processes_per_node")}
    limits = dict.fromkeys(("devices_per_process", "cpus_per_process", "memory_per_process", "time"), some)
    words = st.lists(st.sampled_from(["trainer.seed=1", "resume=auto", "own.py"]), max_size=2).map(tuple)
    more = {"restarts": st.integers(0, 50), "platform": st.sampled_from(["cpu", "cuda"]), "changes": words}
    more |= {"quiet": st.booleans(), "json": st.booleans()}
    return st.builds(Launch, config=st.just("configs/GPT_2.yaml"), **numbers, **limits, **more, **fixed)


@settings(max_examples=20, deadline=None)
@given(launches(), st.sampled_from([(), ("work:/work",), ("work:/work", "data:/data")]))
def test_every_manifest_is_valid_by_the_published_schemas(launch: Launch, volumes: tuple[str, ...]):
    made = documents(launch, volumes=volumes)
    assert list(made) == (["Service", "Job"] if launch.processes > 1 else ["Job"])
    assert made["Job"]["spec"]["completions"] == made["Job"]["spec"]["parallelism"] == launch.processes


def test_the_schemas_would_find_a_wrong_key():
    (job,) = yaml.safe_load_all(manifest(Launch(config="x.yaml"), image="train:1"))
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_the_processes_meet_at_the_name_of_the_first_pod():
    made = documents(Launch(config="a/GPT_2.yaml", nodes=2, processes_per_node=2))
    job, service = made["Job"], made["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    # a pod of an indexed Job has the host name JOB-INDEX, and the subdomain that a headless service has
    assert words[words.index("--coordinator") + 1] == "gpt-2-0.gpt-2:9876"
    assert (job["metadata"]["name"], pod["subdomain"], service["metadata"]["name"]) == ("gpt-2",) * 3
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "gpt-2"}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert words[words.index("--processes") + 1 : words.index("--process") + 2] == ["4", "--process", "$(PROCESS)"]
    assert container["env"][0]["name"] == "PROCESS"


def test_only_codes_of_a_lost_process_or_a_signal_restart_and_a_restart_resumes():
    spec = documents(Launch(config="x.yaml", nodes=2, restarts=5))["Job"]["spec"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    assert {75, 143} <= set(rule["onExitCodes"]["values"]) == set(RESUMABLE)
    assert not {1, 2} & set(RESUMABLE)
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (5, 0)
    assert "resume=auto" in spec["template"]["spec"]["containers"][0]["command"]
    once = documents(Launch(config="x.yaml"))["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert once == ["jax-trainer", "train", "x.yaml"]


def test_a_volume_is_mounted_where_it_is_asked_for():
    launch = Launch(config="x.yaml", devices_per_process=8, memory_per_process=64, time=3600)
    pod = documents(launch, volumes=("work:/work",))["Job"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "work"
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == pod["containers"][0]["workingDir"] == "/work"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "64G"}
    assert pod["activeDeadlineSeconds"] == 3600
    with pytest.raises(LaunchError, match="work=/work"):
        manifest(launch, image="train:1", volumes=("work=/work",))
