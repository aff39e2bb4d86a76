"""torch, for tests of its loaders: where torch or torchdata is not installed, importing this skips the test module."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")
