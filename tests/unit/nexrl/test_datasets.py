"""Tasks: seed and epoch determine their order, and an error names file, line and field."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from nexrl.datasets import MAX_REPORTED, DatasetError, TaskSource, open_dataset, open_datasets
from nexrl.spec import ExperimentSpec
from nexrl.spec.data import JsonlDataSpec, MockDataSpec, ParquetDataSpec, PythonDataSpec, ReasoningGymDataSpec
from nexrl.spec.model import PathModel
from nexrl.spec.trainer import TrainerSpec
from nexrl.spec.validation import ValidationSpec
from tests.support.packages import needs_reasoning_gym

SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def mock(size: int, seed: int = 0, **options: Any) -> TaskSource:
    return open_dataset(MockDataSpec(type="mock", size=size, seed=seed, **options), Path())


def jsonl(folder: Path, text: str | bytes, **options: Any) -> TaskSource:
    (folder / "tasks.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return open_dataset(JsonlDataSpec(type="jsonl", path="tasks.jsonl", **options), folder)


@given(size=st.integers(1, 50), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 1000))
def test_every_epoch_hands_out_each_task_once_in_an_order_that_can_be_repeated(
    size: int, seed: int, epoch: int
) -> None:
    order = [mock(size, seed).task(epoch, index)["id"] for index in range(size)]
    assert sorted(order) == sorted(f"train-{number}" for number in range(size))
    assert order == [mock(size, seed).task(epoch, index)["id"] for index in range(size)]


@pytest.mark.guide("Q6")
def test_epochs_and_seeds_have_different_orders() -> None:
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        source = TaskSource(mock(50).tasks, seed, shuffle=True, epochs=None)
        return tuple(source.task(epoch, index)["id"] for index in range(50))

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9


def test_without_shuffling_tasks_come_as_they_are() -> None:
    source = mock(5, shuffle=False)
    assert [source.task(3, index)["id"] for index in range(5)] == [f"train-{number}" for number in range(5)]


@given(size=st.integers(1, 20), epochs=st.integers(1, 5))
def test_positions_run_through_all_epochs_and_then_end(size: int, epochs: int) -> None:
    source = mock(size, epochs=epochs)
    positions = [source.locate(position) for position in range(epochs * size)]
    assert positions == [(epoch, index) for epoch in range(epochs) for index in range(size)]
    with pytest.raises(IndexError):
        source.locate(epochs * size)


def test_endless_data_has_no_last_position() -> None:
    assert mock(3).total is None
    assert mock(3).locate(10**9) == (333333333, 1)


@pytest.mark.guide("Q7")
def test_jsonl_rows_become_tasks_with_their_other_fields_as_metadata(tmp_path: Path) -> None:
    text = '{"question": "1+1=", "gold": 2, "level": {"of": 1}}\n\n{"question": "é", "gold": "x"}\n'
    source = jsonl(tmp_path, text, prompt_field="question", answer_field="gold")
    assert list(source.tasks) == [
        {"id": "train-0", "prompt": "1+1=", "answer": "2", "metadata": {"level": {"of": 1}}},
        {"id": "train-1", "prompt": "é", "answer": "x", "metadata": {}},
    ]


def test_tasks_may_have_no_answer(tmp_path: Path) -> None:
    assert jsonl(tmp_path, '{"prompt": "play"}', answer_field="").tasks[0]["answer"] is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b"\xff{}", "not UTF-8"),
        (b"[1]", "is list; must be a mapping"),
        (b'{"answer": "b"}', "field 'prompt' must be text, but is missing; found answer"),
        (b'{"prompt": 3, "answer": "b"}', "field 'prompt' must be text, not 3"),
        (b'{"prompt": "", "answer": "b"}', "field 'prompt' must be text"),
        (b'{"prompt": "a"}', "field 'answer' must be text or a number, but is missing"),
        (b'{"prompt": "a", "answer": null}', "field 'answer' must be text or a number, not None"),
        (b'{"prompt": "a", "answer": true}', "field 'answer' must be text or a number, not True"),
        (b'{"prompt": "a", "answer": NaN}', "field 'answer' must be text or a number, not nan"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    with pytest.raises(DatasetError) as caught:
        jsonl(tmp_path, b'{"prompt": "a", "answer": "b"}\n' * 16 + line + b"\n")
    (violation,) = caught.value.violations
    assert violation.field == "spec.data.path"
    assert f"{tmp_path / 'tasks.jsonl'} line 17: {words}" in violation.description


def test_many_broken_lines_make_a_short_message(tmp_path: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        jsonl(tmp_path, "x\n" * 1000)
    assert len(caught.value.violations) == MAX_REPORTED + 1
    assert caught.value.violations[-1].description == "and 990 more"


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DatasetError, match="no tasks"):
        jsonl(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"spec\.data\.path: .*tasks\.jsonl does not exist"):
        open_dataset(JsonlDataSpec(type="jsonl", path="tasks.jsonl"), tmp_path)


@pytest.mark.guide("Q7")
def test_parquet_rows_become_tasks(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": [1, 2], "kind": ["x", None]}), tmp_path / "t")
    source = open_dataset(ParquetDataSpec(type="parquet", path="t"), tmp_path)
    assert source.tasks[1] == {"id": "train-1", "prompt": "b", "answer": "2", "metadata": {"kind": None}}


def test_a_parquet_file_without_the_column_or_without_parquet_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "t")
    with pytest.raises(DatasetError, match="t row 0: field 'answer' must be text or a number, but is missing"):
        open_dataset(ParquetDataSpec(type="parquet", path="t"), tmp_path)
    (tmp_path / "t").write_text("no parquet")
    with pytest.raises(DatasetError, match="is not a Parquet file"):
        open_dataset(ParquetDataSpec(type="parquet", path="t"), tmp_path)


@needs_reasoning_gym
def test_reasoning_gym_tasks_depend_on_the_seed_only() -> None:
    def prompts(seed: int) -> list[str]:
        data = ReasoningGymDataSpec(type="reasoning_gym", name="chain_sum", config=SUMS, size=5, seed=seed)
        return [task["prompt"] for task in open_dataset(data, Path()).tasks]

    assert prompts(1) == prompts(1) != prompts(2)


OF_THE_GLOBAL_RANDOM = """
import json
from pathlib import Path
from nexrl.datasets import open_dataset
from nexrl.spec.data import ReasoningGymDataSpec
data = ReasoningGymDataSpec(type="reasoning_gym", name="list_functions", size=5, seed=1)
print(json.dumps(open_dataset(data, Path()).tasks))
"""


@needs_reasoning_gym
def test_generators_that_use_the_global_random_make_the_same_tasks_in_each_process() -> None:
    def read() -> bytes:
        return subprocess.run([sys.executable, "-c", OF_THE_GLOBAL_RANDOM], check=True, capture_output=True).stdout

    assert read() == read() != b""


@needs_reasoning_gym
def test_reasoning_gym_leaves_the_global_random_as_it_was() -> None:
    before = random.getstate()
    open_dataset(ReasoningGymDataSpec(type="reasoning_gym", name="list_functions", size=5), Path())
    assert random.getstate() == before


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("chain_sums", {}, r"spec\.data\.name: .*did you mean chain_sum"),
        ("chain_sum", {"terms": 2}, r"spec\.data\.config: chain_sum does not accept \{'terms': 2\}"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, r"spec\.data\.config: .*AssertionError"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_refused(name: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        open_dataset(ReasoningGymDataSpec(type="reasoning_gym", name=name, config=config, size=2), Path())


def factory(folder: Path, body: str, module: str) -> TaskSource:
    (folder / f"{module}.py").write_text(f"def tasks(split):\n    {body}\n")
    return open_dataset(PythonDataSpec(type="python", factory=f"{module}:tasks"), folder, "validation")


@pytest.mark.guide("E1", "Q5")
def test_a_factory_beside_the_file_is_called_with_the_split(tmp_path: Path) -> None:
    source = factory(tmp_path, "return [{'prompt': split, 'answer': 1}]", "tasks_of_a_split")
    assert source.tasks[0]["prompt"] == "validation"


def test_metadata_that_is_not_json_is_the_same_text_in_each_process(tmp_path: Path) -> None:
    row = "{'prompt': 'a', 'answer': '1', 'scorer': tasks, 'of': [object()], 'day': datetime.date(2026, 1, 2)}"
    source = factory(tmp_path, f"import datetime; return [{row}]", "tasks_with_a_scorer")
    assert source.tasks[0]["metadata"] == {"scorer": "<function tasks>", "of": ["<object object>"], "day": "2026-01-02"}


@pytest.mark.parametrize(
    ("module", "body", "words"),
    [
        ("tasks_raise", "raise KeyError('x')", r"raised KeyError: 'x'"),
        ("tasks_exit", "raise SystemExit(1)", r"raised SystemExit: 1"),
        ("tasks_none", "return None", "must return a sequence"),
        ("tasks_rows", "return [{'prompt': 'a'}]", "row 0: field 'answer'"),
        ("tasks_syntax", "return (", "cannot import tasks_syntax: SyntaxError"),
    ],
)
def test_a_factory_that_fails_is_named(tmp_path: Path, module: str, body: str, words: str) -> None:
    with pytest.raises(DatasetError, match=words) as caught:
        factory(tmp_path, body, module)
    assert caught.value.violations[0].field == "spec.validation.data.factory"


def test_a_module_or_function_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot import no_such_module"):
        open_dataset(PythonDataSpec(type="python", factory="no_such_module:tasks"), tmp_path)
    with pytest.raises(DatasetError, match="has no tasks"):
        open_dataset(PythonDataSpec(type="python", factory="json:tasks"), tmp_path)


def experiment(*, held_out: bool) -> ExperimentSpec:
    sums = {"type": "reasoning_gym", "name": "chain_sum", "config": SUMS}
    validation = ValidationSpec(
        data=ReasoningGymDataSpec.model_validate({**sums, "size": 20, "seed": 1}), held_out=held_out
    )
    return ExperimentSpec(
        model=PathModel(path="x"),
        data=ReasoningGymDataSpec.model_validate({**sums, "size": 200}),
        trainer=TrainerSpec(steps=1),
        validation=validation,
    )


@needs_reasoning_gym
def test_held_out_prompts_are_left_out_of_training() -> None:
    def overlap(*, held_out: bool) -> int:
        train, validation = open_datasets(experiment(held_out=held_out), Path())
        assert validation is not None
        prompts = {task["prompt"] for task in validation.tasks}
        return sum(task["prompt"] in prompts for task in train.tasks)

    assert overlap(held_out=False) > 0
    assert overlap(held_out=True) == 0


@needs_reasoning_gym
def test_training_on_nothing_but_held_out_prompts_is_refused() -> None:
    same = experiment(held_out=True)
    spec = same.model_copy(update={"validation": ValidationSpec(data=same.data)})
    with pytest.raises(DatasetError, match=r"spec\.validation\.heldOut: every training task"):
        open_datasets(spec, Path())


def test_both_sources_are_checked(tmp_path: Path) -> None:
    missing = JsonlDataSpec(type="jsonl", path="no.jsonl")
    spec = experiment(held_out=True).model_copy(update={"data": missing, "validation": ValidationSpec(data=missing)})
    with pytest.raises(DatasetError) as caught:
        open_datasets(spec, tmp_path)
    assert [violation.field for violation in caught.value.violations] == ["spec.data.path", "spec.validation.data.path"]


@pytest.mark.guide("E1", "Q39")
def test_validation_makes_one_pass_in_order() -> None:
    source = open_dataset(MockDataSpec(type="mock", size=4, epochs=7), Path(), "validation")
    assert source.total == 4
    assert [source.task(0, index)["id"] for index in range(4)] == [f"validation-{number}" for number in range(4)]
