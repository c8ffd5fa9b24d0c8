"""What landed before this change. Each landing is one merge commit; its first parent is the landing before."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> str:
    """Return what git prints. Raises CalledProcessError."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def base() -> str:
    """Return the commit at which this change begins: $BASE, or where HEAD left `main`, or before the landing HEAD."""
    if named := os.environ.get("BASE"):
        return named
    left = _printed("merge-base", "main", "HEAD") or _printed("merge-base", "origin/main", "HEAD")
    return left if left and left != git("rev-parse", "HEAD").strip() else "HEAD^1"


def landings_since(commit: str) -> int | None:
    """Return how many landings HEAD has that `commit` has not; None if there is no such commit.

    A shallow clone may lack the commit: then all landings of the clone are newer.
    """
    wanted = f"{commit}..HEAD"
    if not _printed("rev-parse", "--verify", f"{commit}^{{commit}}"):
        if _printed("rev-parse", "--is-shallow-repository") != "true":
            return None
        wanted = "HEAD"
    return int(git("rev-list", "--first-parent", "--merges", "--count", wanted))


def _printed(*arguments: str) -> str:
    """Return what git prints; "" if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
