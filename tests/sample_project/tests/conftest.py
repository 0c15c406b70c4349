from collections.abc import Iterator

import pytest
import shelf

import tinyq


@pytest.fixture(autouse=True)
def jobs() -> Iterator[tinyq.Kit]:
    with tinyq.testing() as jobs:
        yield jobs


@pytest.fixture(autouse=True)
def empty() -> None:
    shelf.books.clear()
    shelf.outbox.clear()
