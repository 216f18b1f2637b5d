"""For every test: quiet threads, the same random numbers, and the shared data sets where they are."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported, as the command line does it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# The tests run side by side, one a core; and bit-for-bit comparisons need a fixed number of threads.
torch.set_num_threads(1)

_SHARED = Path(__file__).parents[1] / "../shared/data"


def pytest_collection_finish() -> None:
    """Leaves libraries and thousands of tests out of later collections of garbage, a second each with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """``shared_data(name)`` is the folder of a data set beside the repository; without it the test is skipped."""

    def find(name: str) -> Path:
        folder = (_SHARED / name).resolve()
        if not folder.is_dir():
            pytest.skip(f"{name} is not in ../shared/data")
        return folder

    return find
