"""Writes the files that are generated from the schema: `make spec`. With --check, compares them only."""

import sys
from pathlib import Path

from nexrl.spec.crd import crd_file
from nexrl.spec.reference import reference_page

GENERATED = {
    Path("docs/reference/experiment.md"): reference_page,
    Path("deploy/helm/files/experiments.nexrl.dev.yaml"): crd_file,
}


def main() -> None:
    """Writes the files below the current folder; with --check, fails if one of them differs."""
    is_check = sys.argv[1:] == ["--check"]
    for path, content in GENERATED.items():
        if not is_check:
            path.write_text(content())
        elif path.read_text() != content():
            sys.exit(f"{path} differs from src/nexrl/spec: run `make spec`")


if __name__ == "__main__":
    main()
