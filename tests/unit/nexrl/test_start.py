"""How soon a service starts: what it imports, and what it makes of the experiment, before it serves."""

import subprocess
import sys
from pathlib import Path

import pytest

from nexrl.spec import dump_resolved, load_resolved, schema
from tests.support.patience import LIMIT_SECONDS
from tests.support.services import small_experiment

HEAVY = {"aiohttp", "numpy", "torch", "transformers"}


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("nexrl.cli", {"grpc", "nexrl.spec", *HEAVY}),
        ("nexrl_controller.server", HEAVY),
        ("nexrl_weight_sync.server", HEAVY),
        ("nexrl_rollout.server", {"torch"}),
    ],
)
def test_a_process_imports_nothing_heavy_that_it_does_not_need(module: str, unneeded: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert not unneeded & set(done.stdout.split())


def test_a_resolved_experiment_is_read_without_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small_experiment()
    (tmp_path / "experiment.yaml").write_text(dump_resolved(experiment))
    schema.schema_view.cache_clear()
    monkeypatch.setattr(schema, "SchemaView", lambda: pytest.fail("the schema takes 0.2 s to make"))
    assert load_resolved(tmp_path / "experiment.yaml") == experiment
