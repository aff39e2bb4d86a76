"""What tests of runs that are really killed share: the kill, and the result of the complete or resumed run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any


def kill(job: Any, folder: Path, fault: str, *options: int) -> None:
    """Runs the job (a module with `main`) in a process of its own, which the fault kills before it has a result."""
    command = [sys.executable, job.__file__, str(folder), *map(str, options)]
    environment = {**os.environ, "JAXTRAINER_FAILPOINT": fault}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert not (folder / "result.json").exists()


def result_of(job: Any, folder: Path, *options: int) -> dict[str, Any]:
    """The result of the job, which starts or resumes in this process."""
    job.main(folder, *options)
    return json.loads((folder / "result.json").read_text())
