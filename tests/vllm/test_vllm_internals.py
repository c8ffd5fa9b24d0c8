"""Each row of nexrl_inference.vllm.internals in the installed vLLM, or in the one unpacked in VLLM_SOURCE."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from nexrl_inference.vllm.internals import INTERNALS, Internal
from tests.support.marks import ROOT

pytestmark = pytest.mark.vllm
PLUGIN = ROOT / "services/inference/nexrl_inference/vllm"


def _vllm() -> Path:
    if given := os.environ.get("VLLM_SOURCE"):
        return Path(given) / "vllm"
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@pytest.mark.parametrize("row", INTERNALS, ids=lambda row: f"{row.place}: {row.texts[0]}")
def test_what_we_rely_on_is_in_this_vllm(row: Internal) -> None:
    place = _vllm() / row.place
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    source = "\n".join(path.read_text() for path in files)
    assert [text for text in row.texts if text not in source] == [], f"{row.used_by}: {row.breaks}"


def test_every_import_of_the_plugin_has_a_row() -> None:
    lines = [line for line in (PLUGIN / "plugin.py").read_text().splitlines() if line.startswith("from vllm.")]
    for line in lines:
        module, names = line.removeprefix("from vllm.").split(" import ")
        rows = [row for row in INTERNALS if module.replace(".", "/") == row.place.removesuffix(".py")]
        assert rows, module
        assert all(any(name in text for row in rows for text in row.texts) for name in names.split(", ")), line
