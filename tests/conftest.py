"""Fixtures that several files use."""

import pytest
from clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
