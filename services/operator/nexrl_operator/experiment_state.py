"""What the operator remembers about one experiment between two reconciliations."""

from dataclasses import dataclass, field

from nexrl_operator.children import Renderer


@dataclass(frozen=True)
class Restored:
    """An object that somebody had changed was put back."""

    pause_until: float
    """Unix time before which it is not put back again."""
    pause_seconds: float


@dataclass
class ExperimentState:
    """Kept in memory only. A restarted operator begins with a new state."""

    uid: str
    """UID of the experiment. A later experiment with the same name gets a new state."""
    rendering: tuple[tuple[object, ...], Renderer] | None = None
    """What the renderer of its valid spec was made from, and the renderer: to render takes most of a reconciliation."""
    ledger: str = ""
    """Name of the experiment's ledger in the release's Redis; "" while it has no ledger there."""
    is_expiring: bool | None = None
    """Whether the keys of its ledger have got their TTL, because it has ended; None: not known yet."""
    shown_phase: str = ""
    """The phase that the metrics show; "" if they show none."""
    audit_failing_since: float | None = None
    """Time of the first failed attempt of an audit; None while no audit is failing."""
    secrets_checked_at: float = 0.0
    """Time of the last check that the Secrets exist; 0.0 before the first check."""
    secrets_renewed_at: float = 0.0
    """Time at which the Secrets were applied last."""
    verified: dict[tuple[str, str], str] = field(default_factory=dict)
    """By kind and name: the digest of an object that is as the operator applied it."""
    restored: dict[tuple[str, str], Restored] = field(default_factory=dict)
    """By kind and name: how a change made by hand was put back last."""
