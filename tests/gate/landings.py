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
    """Return how many landings HEAD has that `commit` has not; None if this clone has no such commit."""
    number = _printed("rev-list", "--first-parent", "--merges", "--count", f"{commit}..HEAD")
    return int(number) if number else None


def _printed(*arguments: str) -> str:
    """Return what git prints; "" if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
