"""Datasets for torch's loaders; apart from the rest, as worker processes import this file."""

import numpy as np

EXAMPLES = 22
IDS = np.arange(1, EXAMPLES + 1, dtype=np.int32)


class Numbers:
    """The ids, which records the indices that are read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        self.read.append(index)
        import torch  # pyright: ignore[reportMissingImports]

        return torch.tensor(IDS[index])


class CountsOn(Numbers):
    """One whose examples depend on how many it has given, over all epochs."""

    def __init__(self):
        super().__init__()
        self._given = 0

    def __getitem__(self, index):
        self._given += 1
        return super().__getitem__(index) + 100 * self._given

    def state_dict(self):
        return {"given": self._given}

    def load_state_dict(self, state):
        self._given = state["given"]
