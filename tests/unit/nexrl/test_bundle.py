"""`nexrl submit` puts modules into the document; the definition of the resource is current."""

from pathlib import Path

import pytest

from nexrl.spec import SpecError, load_experiment, load_resolved, yaml_core
from nexrl.spec.bundle import bundle
from nexrl.spec.crd import crd_file
from tests.support.guide import ROOT

CRD_FILE = ROOT / "deploy/helm/files/experiments.nexrl.dev.yaml"


def test_the_example_is_what_submit_makes_of_its_folder() -> None:
    made = bundle(ROOT / "examples/sort-digits/experiment.yaml")
    assert yaml_core.load((ROOT / "examples/sort-digits.yaml").read_text()) == made


def test_one_machine_takes_the_same_document(tmp_path: Path) -> None:
    from nexrl.local.run_folder import RunFolder

    experiment = load_experiment(ROOT / "examples/sort-digits.yaml")
    folder = RunFolder(tmp_path, experiment)
    resolved = load_resolved(folder.experiment_file)
    assert resolved.folder == folder.path / "code"
    assert (resolved.folder / "sort_digits.py").read_text() == experiment.spec.code["sort_digits.py"]
    folder.close()


def test_modules_are_bundled_with_what_they_import(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("import json\nfrom words import WORDS\n")
    (tmp_path / "words.py").write_text("WORDS = []\n")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "x.yaml").write_text("spec: {data: {type: python, factory: task:tasks}}\n")
    assert set(bundle(tmp_path / "x.yaml")["spec"]["code"]) == {"task.py", "words.py"}


def test_a_package_is_not_bundled(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task/__init__.py").write_text("")
    (tmp_path / "x.yaml").write_text("spec: {data: {type: python, factory: task:tasks}}\n")
    with pytest.raises(SpecError, match="put it into an image"):
        bundle(tmp_path / "x.yaml")


def test_the_definition_is_up_to_date_and_small() -> None:
    assert CRD_FILE.read_text() == crd_file(), "run: python -m nexrl.spec.crd > deploy/helm/files/..."
    assert len(CRD_FILE.read_bytes()) < 100_000
