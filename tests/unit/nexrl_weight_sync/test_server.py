"""The settings that weight sync gets from the experiment."""

import json

import pytest

from nexrl.spec import ExperimentSpec
from nexrl_weight_sync.server import MARGIN_SECONDS, rules


def spec(**sections: object) -> ExperimentSpec:
    document = {"model": {"scratch": {"alphabet": "01"}}, "data": {"type": "mock"}, "trainer": {"steps": 10}}
    room = {"rollout": {"maxNewTokens": 8}, "inference": {"maxTokensPerRow": 32}}
    return ExperimentSpec.model_validate_json(json.dumps(document | room | sections))


@pytest.mark.parametrize(
    ("weight_sync", "max_lag_steps"),
    [({"mode": "sync"}, 0), ({"mode": "batch-async", "stalenessThreshold": 3}, 3), ({"mode": "fully-async"}, None)],
)
def test_the_mode_decides_how_far_the_committed_version_may_lag(
    weight_sync: dict[str, object], max_lag_steps: int | None
) -> None:
    assert rules(spec(weightSync=weight_sync)).max_lag_steps == max_lag_steps


@pytest.mark.guide("L1")
def test_a_sync_may_take_as_long_as_the_experiment_allows_each_of_its_phases() -> None:
    assert rules(spec(weightSync={"timeoutSeconds": 7})).sync_seconds == 2 * 7 + MARGIN_SECONDS


@pytest.mark.guide("Q38", "R6", "S10")
@pytest.mark.parametrize(
    ("settings", "due"),
    [
        ({}, [0, 10]),
        ({"beforeTraining": False}, [10]),
        ({"everySteps": 4}, [0, 4, 8, 10]),
        ({"beforeTraining": False, "everySteps": 5}, [5, 10]),
    ],
)
def test_versions_due_for_validation(settings: dict[str, object], due: list[int]) -> None:
    its_rules = rules(spec(validation={"data": {"type": "mock"}, **settings}))
    assert [version for version in range(11) if its_rules.is_due(version)] == due


def test_without_validation_nothing_is_due() -> None:
    assert not any(rules(spec()).is_due(version) for version in range(11))
