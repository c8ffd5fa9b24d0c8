"""Reads and checks the tasks of an experiment's data sections before anything starts.

All tasks of a source are kept in memory (at most MAX_TASKS). Their order is a pure function of seed and epoch, so a
checkpoint only stores the position in the sequence of all epochs.
"""

import difflib
import json
import logging
import math
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, cast

import numpy as np

from nexrl.code_reference import USER_CODE_ERRORS, load_reference
from nexrl.errors import InvalidArgumentError, Violation

if TYPE_CHECKING:  # nexrl.spec.machine checks the tasks of a file with this module
    from nexrl.spec.data import DataSpec, FileDataSpec, MockDataSpec, PythonDataSpec, ReasoningGymDataSpec
    from nexrl.spec.experiment import ExperimentSpec

log = logging.getLogger(__name__)

MAX_TASKS = 1_000_000
MAX_REPORTED = 10
"""Wrong rows listed in one message."""
SLOW_SECONDS = 30.0
"""Data that is not read by then is reported: a factory of the user may never return."""

Split = Literal["train", "validation"]


class Task(TypedDict):
    """One item of a data set: JSON values only, as it is sent by RPC. `metadata` has the row's other fields."""

    id: str
    prompt: str
    answer: str | None
    metadata: dict[str, object]


class DatasetError(InvalidArgumentError):
    """A source of tasks cannot be used. `violations` name the experiment's key, and file, line and field."""


@dataclass(frozen=True)
class TaskSource:
    """The tasks of one split, and the order in which they are granted."""

    tasks: Sequence[Task]
    seed: int
    shuffle: bool
    epochs: int | None

    def __len__(self) -> int:
        """Number of tasks per epoch; at least 1."""
        return len(self.tasks)

    @property
    def total(self) -> int | None:
        """Number of tasks in all epochs; None if there is no limit."""
        return None if self.epochs is None else self.epochs * len(self)

    def locate(self, position: int) -> tuple[int, int]:
        """Return epoch and index of a position in the sequence of all epochs. Raises IndexError past its end."""
        if position < 0 or (self.total is not None and position >= self.total):
            raise IndexError(f"position {position} of {self.total} tasks")
        return divmod(position, len(self))

    def task(self, epoch: int, index: int) -> Task:
        """Return the task at `index` in the order of `epoch`. Raises IndexError for an index outside the source."""
        if not 0 <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return self.tasks[_order(self.seed, epoch, len(self))[index] if self.shuffle else index]


class Datasets(NamedTuple):
    """The tasks of an experiment."""

    train: TaskSource
    validation: TaskSource | None


def open_datasets(spec: "ExperimentSpec", folder: Path, on_slow: Callable[[str], object] = log.warning) -> Datasets:
    """Read and check all tasks of an experiment. Training omits the prompts that validation holds out.

    Relative paths and modules of the user are searched in `folder`. Raises DatasetError for all problems at once.
    `on_slow` is called, in another thread, with a message that names a source that takes more than SLOW_SECONDS.
    """
    violations: list[Violation] = []
    sources: dict[Split, TaskSource] = {}
    wanted: dict[Split, DataSpec] = {"train": spec.data}
    if spec.validation is not None:
        wanted["validation"] = spec.validation.data
    for split, data in wanted.items():
        try:
            with _reported_if_slow(data, split, on_slow):
                sources[split] = open_dataset(data, folder, split)
        except DatasetError as error:
            violations += error.violations
    if violations:
        raise _error(violations)
    validation = sources.get("validation")
    if spec.validation is None or validation is None or not spec.validation.held_out:
        return Datasets(sources["train"], validation)
    return Datasets(_without_prompts(sources["train"], {task["prompt"] for task in validation.tasks}), validation)


def open_dataset(data: "DataSpec", base_path: Path, split: Split = "train") -> TaskSource:
    """Read and check the tasks of one data section.

    Relative paths and modules of the user are searched in `base_path`. Raises DatasetError.
    """
    rows = _rows(data, base_path, split)
    tasks: list[Task] = []
    problems: list[str] = []
    for number, (place, parse) in enumerate(islice(rows.rows, MAX_TASKS + 1)):
        try:
            tasks.append(_task(parse(), rows, f"{split}-{number}"))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if len(tasks) + len(problems) > MAX_TASKS:
        problems = [f"{rows.name}: more than {MAX_TASKS} tasks"]
    if not tasks and not problems:
        problems = [f"{rows.name}: no tasks"]
    if problems:
        rest = [f"and {len(problems) - MAX_REPORTED} more"] if len(problems) > MAX_REPORTED else []
        raise _error([Violation(rows.key, problem) for problem in problems[:MAX_REPORTED] + rest])
    is_training = split == "train"  # validation is one epoch, in the order of the source
    return TaskSource(tasks, data.seed, data.shuffle and is_training, data.epochs if is_training else 1)


@contextmanager
def _reported_if_slow(data: "DataSpec", split: Split, report: Callable[[str], object]) -> Iterator[None]:
    described = f"{_section(split)}: {data.type} data is not read after {SLOW_SECONDS:g} s; the run waits for it"
    if data.type == "python":
        factory = cast("PythonDataSpec", data).factory
        described = (
            f"{_section(split)}.factory: {factory}({split!r}) has not returned for {SLOW_SECONDS:g} s. "
            "The run waits for it. If it never ends, stop the run and correct the function"
        )
    timer = threading.Timer(SLOW_SECONDS, report, [described])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class _Rows:
    """Rows of a source. Each has a place, for messages, and a function that parses it or raises ValueError."""

    key: str
    name: str
    rows: Iterable[tuple[str, Callable[[], object]]]
    prompt_field: str = "prompt"
    answer_field: str = "answer"


def _rows(data: "DataSpec", folder: Path, split: Split) -> _Rows:
    section = _section(split)
    match data.type:
        case "mock":
            return _Rows(section, "mock", _plain("mock", _mock(cast("MockDataSpec", data), split)))
        case "reasoning_gym":
            return _generated_rows(cast("ReasoningGymDataSpec", data), section)
        case "python":
            return _factory_rows(cast("PythonDataSpec", data), folder, split, f"{section}.factory")
        case _:
            return _file_rows(cast("FileDataSpec", data), folder, f"{section}.path")


def _section(split: Split) -> str:
    return "spec.data" if split == "train" else "spec.validation.data"


def _generated_rows(data: "ReasoningGymDataSpec", section: str) -> _Rows:
    return _Rows(section, data.name, _plain(data.name, _reasoning_gym(data, section)), prompt_field="question")


def _factory_rows(data: "PythonDataSpec", folder: Path, split: Split, key: str) -> _Rows:
    return _Rows(key, data.factory, _plain(data.factory, _from_factory(data, folder, split, key)))


def _file_rows(data: "FileDataSpec", folder: Path, key: str) -> _Rows:
    path = _file(folder / data.path, key)
    rows = _jsonl(path) if data.type == "jsonl" else _plain(str(path), _parquet(path, key))
    return _Rows(key, str(path), rows, data.prompt_field, data.answer_field)


def _task(row: object, rows: _Rows, task_id: str) -> Task:
    """Return the task of a row. Raises ValueError that says what is wrong."""
    if not isinstance(row, Mapping):
        raise ValueError(f"is {type(row).__name__}; must be a mapping")
    prompt = row.get(rows.prompt_field)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"field {rows.prompt_field!r} must be text, {_found(row, rows.prompt_field)}")
    answer = row.get(rows.answer_field) if rows.answer_field else None
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if rows.answer_field and not isinstance(answer, str) and not is_number:
        raise ValueError(f"field {rows.answer_field!r} must be text or a number, {_found(row, rows.answer_field)}")
    others = {str(name): value for name, value in row.items() if name not in {rows.prompt_field, rows.answer_field}}
    return Task(id=task_id, prompt=prompt, answer=None if answer is None else str(answer), metadata=_as_json(others))


def _as_json(metadata: Mapping[str, object]) -> dict[str, object]:
    # Generators and Parquet yield tuples, dates and decimals. JSON turns these into lists and text before the RPC does.
    restored: dict[str, object] = json.loads(json.dumps(metadata, default=_as_text, skipkeys=True, allow_nan=False))
    return restored


def _as_text(value: object) -> str:
    """Return a text that is the same in each process: without the address in memory that Python's default repr has."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _found(row: Mapping[object, object], field: str) -> str:
    if field not in row:
        return f"but is missing; found {', '.join(map(str, row)) or 'no field'}"
    return f"not {row[field]!r}"[:80]


def _plain(name: str, rows: Iterable[object]) -> Iterator[tuple[str, Callable[[], object]]]:
    for number, row in enumerate(rows):
        yield f"{name} row {number}", lambda row=row: row  # type: ignore[misc]


def _mock(data: "MockDataSpec", split: Split) -> Iterator[dict[str, str]]:
    numbers = np.random.default_rng((data.seed, split == "validation")).integers(10**8, 10**9, size=data.size)
    return ({"prompt": str(number), "answer": str(number)} for number in numbers)


def _jsonl(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path} line {number}", lambda line=line: _parse_json(line)  # type: ignore[misc]


def _parse_json(line: bytes) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1}") from error


def _parquet(path: Path, key: str) -> Iterator[object]:
    import pyarrow  # imported here: other sources do not need it
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise _error([Violation(key, f"{path} is not a Parquet file: {error}")]) from error
    return (row for batch in table.iter_batches() for row in batch.to_pylist())


def _reasoning_gym(data: "ReasoningGymDataSpec", section: str) -> Iterator[object]:
    try:
        import reasoning_gym  # imported here: an optional package, and slow to import
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        described = f"{error}; install nexrl[reasoning-gym], which needs a C compiler"
        raise _error([Violation(f"{section}.type", described)]) from error
    if data.name not in DATASETS:
        near = difflib.get_close_matches(data.name, DATASETS, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else f"; it has {', '.join(sorted(DATASETS))}"
        raise _error([Violation(f"{section}.name", f"reasoning-gym has no dataset {data.name!r}{hint}")])
    try:
        with _seeded(data.seed):  # some generators, such as list_functions, use the global `random`
            generated = reasoning_gym.create_dataset(data.name, size=data.size, seed=data.seed, **data.config)
            entries = [generated[index] for index in range(data.size)]
    except Exception as error:  # reasoning-gym checks parameters with assert, TypeError and ValueError
        described = f"{data.name} does not accept {data.config}: {type(error).__name__}: {error}"
        raise _error([Violation(f"{section}.config", described)]) from error
    return ({"question": entry["question"], "answer": entry["answer"], **entry["metadata"]} for entry in entries)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global `random`, and restore its state afterwards."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _from_factory(data: "PythonDataSpec", folder: Path, split: Split, key: str) -> Sequence[object]:
    try:
        factory = load_reference(data.factory, folder)
        tasks = factory(split) if callable(factory) else None
    except InvalidArgumentError as error:
        raise _error([Violation(key, error.message)]) from error
    except USER_CODE_ERRORS as error:
        raise _error([Violation(key, f"{data.factory}({split!r}) raised {type(error).__name__}: {error}")]) from error
    if not isinstance(tasks, Sequence) or isinstance(tasks, str):
        raise _error([Violation(key, f"{data.factory}({split!r}) must return a sequence of mappings")])
    return tasks


def _without_prompts(source: TaskSource, prompts: set[str]) -> TaskSource:
    tasks = [task for task in source.tasks if task["prompt"] not in prompts]
    if not tasks:
        described = "every training task is also a validation task; use another seed or file, or set heldOut to false"
        raise _error([Violation("spec.validation.heldOut", described)])
    return TaskSource(tasks, source.seed, source.shuffle, source.epochs)


def _file(path: Path, key: str) -> Path:
    if not path.is_file():
        raise _error([Violation(key, f"{path} {'is not a file' if path.exists() else 'does not exist'}")])
    return path


def _error(violations: Sequence[Violation]) -> DatasetError:
    return DatasetError("; ".join(map(str, violations)), violations=violations)


@lru_cache(maxsize=4)  # called once per task; the permutation is of the whole epoch
def _order(seed: int, epoch: int, size: int) -> Sequence[int]:
    order: list[int] = np.random.default_rng((seed, epoch)).permutation(size).tolist()
    return order
