"""Which keys of a stored Experiment may change, and when: always, only while it is suspended, never."""

import copy

import pytest

from nexrl.k8s.api import Api, ApiError
from tests.support.documents import Object, change, document

ALWAYS: dict[str, Object] = {
    "replicas": {"rollout__replicas": 4},
    "ttl": {"ttlSecondsAfterFinished": 60},
    "deadline": {"activeDeadlineSeconds": 3600},
    "rollout-template": {"rollout__template": {"metadata": {"labels": {"a": "b"}}}},
    "inference-template": {"inference__template": {"spec": {"priorityClassName": "high"}}},
}
WHILE_SUSPENDED: dict[str, Object] = {
    "steps": {"trainer__steps": 8},
    "learning-rate": {"algorithm__learningRate": 0.1},
    "workers": {"rollout__workers": 3},
    "engines": {"inference__replicas": 2},
    "validation": {"validation": {"data": {"type": "mock"}}},
    "code": {"code": {"task.py": "x = 2"}},
    "trainer-template": {"trainer__template": {"spec": {"nodeSelector": {"a": "b"}}}},
}
NEVER: dict[str, Object] = {
    "model": {"model__seed": 1},
    "data": {"data__seed": 1},
    "batch": {"trajectoryPool__batchSize": 128},
    "group": {"trajectoryPool__groupSize": 4},
    "storage": {"storage__size": "20Gi"},
    "managed-by": {"managedBy": "kueue.x-k8s.io/multikueue"},
}


async def _changed(api: Api, changes: Object, *, suspend: bool) -> Object:
    """A stored experiment with these changes, ready to be replaced."""
    stored = await api.create(document(suspend=suspend))
    changed = copy.deepcopy(stored)
    for path, value in changes.items():
        change(changed["spec"], path, value)
    return changed


@pytest.mark.parametrize("changes", ALWAYS.values(), ids=ALWAYS.keys())
async def test_what_may_change_at_any_time_does(api: Api, changes: Object) -> None:
    await api.replace(await _changed(api, changes, suspend=False))


@pytest.mark.parametrize("changes", WHILE_SUSPENDED.values(), ids=WHILE_SUSPENDED.keys())
async def test_the_rest_changes_only_while_suspended(api: Api, changes: Object) -> None:
    with pytest.raises(ApiError, match=r"set spec\.suspend to true"):
        await api.replace(await _changed(api, changes, suspend=False))
    await api.replace(await _changed(api, changes, suspend=True))
    await api.replace(await _changed(api, {**changes, "suspend": False}, suspend=True))  # as Kueue does
    await api.replace(await _changed(api, {**changes, "suspend": True}, suspend=False))


@pytest.mark.parametrize("changes", NEVER.values(), ids=NEVER.keys())
async def test_what_makes_it_that_experiment_never_changes(api: Api, changes: Object) -> None:
    for suspend in (False, True):
        with pytest.raises(ApiError, match="never changes"):
            await api.replace(await _changed(api, changes, suspend=suspend))
