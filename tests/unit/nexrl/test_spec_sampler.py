"""data.sampler in the experiment file."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nexrl.spec.data import DataSpec
from nexrl.spec.validation import ValidationSpec

DIFFICULTY = {"type": "difficulty"}


def mock_data(sampler: dict[str, Any]) -> dict[str, Any]:
    return {"type": "mock", "sampler": sampler}


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ({"type": "difficulty", "easyReward": 0.5, "hardReward": 0.5}, "must be below easyReward"),
        ({"type": "difficulty", "easyProbability": 0}, "greater than or equal to 0.01"),
        ({"type": "difficulty", "function": "mine:share"}, "function"),
        ({"type": "python"}, "function"),
    ],
)
def test_a_sampler_that_cannot_be_is_refused_by_its_key(sampler: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(DataSpec).validate_python(mock_data(sampler))


def test_validation_grants_every_task_once() -> None:
    with pytest.raises(ValidationError, match="validation grants every task once; drop sampler"):
        ValidationSpec.model_validate({"data": mock_data(DIFFICULTY)})
