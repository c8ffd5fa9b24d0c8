"""Spawned processes that work together, such as the ranks of a trainer. Each answers requests of the test."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.support.patience import LIMIT_SECONDS


class SpawnedProcesses:
    """Process i runs `main(i, *arguments, connection)`: it answers until the connection is closed."""

    def __init__(self, number: int, main: Callable[..., None], *arguments: object) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for index in range(number):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=main, args=(index, *arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._processes)

    def ask(self, request: object, number: int | None = None, silent: int | None = None) -> list[Any]:
        """Send the request to the first `number` processes, by default all, and return their answers in order.

        Process `silent` is not waited for.
        """
        connections = self._connections[:number]
        for connection in connections:
            connection.send(request)
        return [connection.recv() for index, connection in enumerate(connections) if index != silent]

    def kill(self, index: int) -> None:
        """Kill a process with SIGKILL, also one that is stopped."""
        self._processes[index].kill()

    def end(self) -> None:
        """End the processes; returns when they are gone."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(LIMIT_SECONDS)
            process.kill()
            process.join()
