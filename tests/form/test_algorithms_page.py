"""docs/reference/algorithms.md has a row for each choice, and names tests that exist."""

import re
from pathlib import Path
from typing import get_args

import pytest

from nexrl.spec.algorithm import AlgorithmSpec
from nexrl.spec.correction import CorrectionSpec
from nexrl.spec.variants import value_of, variants
from nexrl_trainer.advantages import ADVANTAGES
from nexrl_trainer.losses import LOSSES
from nexrl_trainer.preference import PREFERENCE_LOSSES

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/reference/algorithms.md").read_text()
AGGREGATIONS = [value_of(variant, "aggregation") for variant in variants(AlgorithmSpec)["aggregation"]]
ESTIMATORS = get_args(AlgorithmSpec.model_fields["kl_estimator"].annotation)
OPTIMIZERS = get_args(AlgorithmSpec.model_fields["optimizer"].annotation)
TARGETS = [field.alias for name, field in AlgorithmSpec.model_fields.items() if name.endswith("_target")]
CORRECTIONS = [field.alias for field in CorrectionSpec.model_fields.values()]


@pytest.mark.parametrize(
    "choice",
    [*LOSSES, *PREFERENCE_LOSSES, *ADVANTAGES, *AGGREGATIONS, *ESTIMATORS, *CORRECTIONS, *OPTIMIZERS, *TARGETS],
)
def test_each_choice_has_a_row(choice: str) -> None:
    assert re.search(rf"^\| `{choice}` \|", PAGE, re.MULTILINE)


def test_the_tests_it_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(set(named)) >= 7
    assert not [path for path in named if not (REPOSITORY / path).is_file()]
