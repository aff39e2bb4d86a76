"""Where in the user's own code an error came from, among all the frames of libraries."""

import sysconfig
import traceback
from pathlib import Path
from typing import TypeVar

Error = TypeVar("Error", bound=BaseException)

_paths = sysconfig.get_paths()
# jax and flax may be installed anywhere that is on the path; what is installed is not the user's own
_OTHERS = tuple({str(Path(path)) for path in (_paths["stdlib"], _paths["purelib"], _paths["platlib"])})
_OURS = str(Path(__file__).parent.parent)


def with_own_line(error: Error) -> Error:
    """`error` with a first note that says where in the user's code it was raised; as it is, where it was not."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if frames:
        last = frames[-1]
        note = f'In your code: File "{last.filename}", line {last.lineno}, in {last.name}\n    {last.line}'
        notes = getattr(error, "__notes__", [])
        if note not in notes:
            error.__notes__ = [note, *notes]
    return error


def _is_own(file: str) -> bool:
    return not (file.startswith((*_OTHERS, _OURS, "<frozen")) or "site-packages" in file)
