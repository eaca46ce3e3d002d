"""What tests of bits share.

One compute thread for small models: more would only spin beside forebay's own workers.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_compute_thread():
    """The update's own threads are not torch's and stay as each test sets them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def deterministic():
    """torch's kernels of fixed order, and an error where there is none."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
