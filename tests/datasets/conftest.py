"""Lets the tests of this folder share `data_sources`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
