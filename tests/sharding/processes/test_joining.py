import pytest

from jax_trainer.sharding import Job, JoinError, detect_launcher, join


def test_an_incomplete_job_is_an_error_that_names_what_is_missing():
    for described, message in [
        ({"processes": 2}, "missing coordinator, process"),
        ({"coordinator": "here:1", "processes": 2}, "missing process"),
        ({"coordinator": "here:1", "processes": 2, "process": 2}, "Process 2 cannot be one of 2"),
        ({"coordinator": "here", "processes": 2, "process": 0}, "must be host:port"),
    ]:
        with pytest.raises(JoinError, match=message):
            Job(**described)


def test_the_launcher_is_detected_from_the_environment():
    for environment, launcher in [
        ({}, ""),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ""),
        ({"SLURM_NTASKS": "8"}, ""),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, "SLURM"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "Open MPI"),
    ]:
        assert detect_launcher(environment) == launcher, (environment, launcher)


def test_without_other_processes_the_error_names_the_options():
    with pytest.raises(JoinError, match=r"(?s)--coordinator host:port --processes N --process I"):
        join()
