"""`nexrl submit` puts modules into the document; the definition of the resource is current."""

from pathlib import Path

import pytest

from nexrl.spec import SpecError, load_experiment, load_resolved, validate_file, yaml_core
from nexrl.spec.bundle import bundle
from nexrl.spec.crd import crd_file
from tests.support.marks import ROOT
from tests.support.packages import needs_reasoning_gym

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
    with pytest.raises(SpecError, match="install it in an image"):
        bundle(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = 1\ndef f(:\n", "line 2: not valid Python: invalid syntax"),
        (b"a = 1\n\nb = '\xe9'\n", "line 3: not UTF-8: "),
        (b"# coding: latin-1\nb = '\xe9'\n", "line 2: not UTF-8: "),
        (b"a = '\0'\n", "line 1: not valid Python: "),
    ],
    ids=["syntax", "encoding", "declared encoding", "null byte"],
)
def test_a_module_that_python_cannot_read_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.yaml").write_text("spec: {data: {type: python, factory: task:tasks}}\n")
    (tmp_path / "task.py").write_text("import words\n")
    (tmp_path / "words.py").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        bundle(tmp_path / "x.yaml")
    assert str(caught.value.violations[0]).startswith(f"{tmp_path / 'words.py'} {message}")


def test_the_definition_is_up_to_date_and_small() -> None:
    assert CRD_FILE.read_text() == crd_file(), "run: make spec"
    # `kubectl apply` keeps a copy in an annotation, and annotations may have 262,144 bytes.
    assert len(CRD_FILE.read_bytes()) < 200_000


@pytest.mark.parametrize(
    "example",
    [
        "sort-digits/experiment.yaml",
        "lora-sums/experiment.yaml",
        "high-card/experiment.yaml",
        pytest.param("smollm2-arithmetic.yaml", marks=needs_reasoning_gym),
    ],
)
def test_examples_can_run_here(example: str) -> None:
    assert validate_file(ROOT / "examples" / example) == []
