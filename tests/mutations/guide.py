"""Takes the feature of each row of the developer guide out of a copy of the project; a test must fail without it.

    python -m tests.mutations.guide                  all rows that have a mutation
    python -m tests.mutations.guide --rows H7,Q33    these rows
    python -m tests.mutations.guide --base main      rows whose mutation, mutated file or test changed since `main`

Ends with code 1 when a test passes without the feature that it is marked with, or when a mutation is out of date.
"""

import argparse
import sys
from collections.abc import Sequence

from tests.mutations.copies import PROJECT, Mutation, commit_before, files_changed, git, try_all
from tests.mutations.features import FOLDER, Feature, load_features, parse, resolve
from tests.support.marks import TESTS, find_tests


def main() -> None:
    """Try the mutations that the command line selects, several at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only these rows, separated by commas")
    parser.add_argument("--base", default="", help="only rows that changed since this commit")
    arguments = parser.parse_args()
    features = load_features()
    try:
        mutations = resolve(features, find_tests(TESTS))
    except ValueError as error:
        sys.exit(str(error))
    chosen = list(zip(features, mutations, strict=True))
    if arguments.rows:
        rows = set(arguments.rows.split(","))
        chosen = [(feature, mutation) for feature, mutation in chosen if rows & set(feature.rows)]
    if arguments.base:
        chosen = _changed(chosen, arguments.base)
    _try([mutation for _, mutation in chosen])


def _try(mutations: Sequence[Mutation]) -> None:
    missed = []
    verdicts = try_all(mutations, must_pass=sorted({mutation.test for mutation in mutations}))
    for number, (mutation, verdict) in enumerate(zip(mutations, verdicts, strict=True), 1):
        mark = "noticed" if verdict.is_noticed else "NOT NOTICED"
        sys.stdout.write(
            f"{number}/{len(mutations)} {mark}: {mutation.what} without {mutation.text!r}: {verdict.says}\n"
        )
        sys.stdout.flush()
        if not verdict.is_noticed:
            missed.append(f"{mutation.what}: {mutation.test} passes without {mutation.text!r} in {mutation.path}")
    if missed:
        sys.exit("\n".join([f"{len(missed)} of {len(mutations)} mutations are not noticed:", *missed]))
    sys.stdout.write(f"all {len(mutations)} mutations are noticed\n")


def _changed(chosen: list[tuple[Feature, Mutation]], base: str) -> list[tuple[Feature, Mutation]]:
    """Those whose mutation, mutated file or test file differs from the commit where this branch left `base`."""
    since = commit_before(base)
    if since is None:
        sys.stdout.write(f"commit {base} is not in this clone: only the texts of the mutations were checked\n")
        return []
    files = files_changed(since)
    known = {feature for path in FOLDER.glob("*.yaml") for feature in _features_at(since, path.name)}
    return [
        (feature, mutation)
        for feature, mutation in chosen
        if feature not in known or mutation.path in files or mutation.test.partition("::")[0] in files
    ]


def _features_at(commit: str, name: str) -> list[Feature]:
    text = git("show", f"{commit}:./{(FOLDER / name).relative_to(PROJECT)}")
    return parse(text) if text else []


if __name__ == "__main__":
    main()
