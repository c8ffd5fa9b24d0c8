"""How `nexrl serve` starts a service."""

import gc
from collections.abc import Callable, Iterator

import pytest

from nexrl import cli


class EntryPoint:
    """A service that records whether the garbage collector runs while it is imported, and while it serves."""

    name = "recording"

    def __init__(self) -> None:
        self.is_collected: list[bool] = []
        self.frozen = 0

    def load(self) -> Callable[[], None]:
        self.is_collected.append(gc.isenabled())
        return self.main

    def main(self) -> None:
        self.is_collected.append(gc.isenabled())
        self.frozen = gc.get_freeze_count()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPoint]:
    point = EntryPoint()
    monkeypatch.setattr(cli, "entry_points", lambda group: [point])
    yield point
    gc.unfreeze()
    gc.enable()


def test_a_service_is_imported_without_garbage_collection_and_served_with_it(service: EntryPoint) -> None:
    cli.serve(service.name)
    assert service.is_collected == [False, True]
    assert service.frozen > 0
