"""What a guard is, and where guards and their tests are."""

from dataclasses import dataclass

POOL = "services/trajectory_pool/nexrl_trajectory_pool/"
LUA = POOL + "ledger/"
LEDGER = "tests/integration/test_ledger.py::"
LEDGER_REFILL = "tests/integration/test_ledger_refill.py::"
LEDGER_TRAINING = "tests/integration/test_ledger_training.py::"
LEDGER_FORGETTING = "tests/integration/test_ledger_forgetting.py::"
FAULTS = "tests/integration/test_ledger_faults.py"
SERVICE = "tests/integration/test_trajectory_pool.py::"
HISTORIES = "tests/integration/test_ledger_properties.py"
AUDIT = "tests/integration/test_ledger_audit.py"
RESULTS = "tests/unit/nexrl_trajectory_pool/test_results.py"


@dataclass(frozen=True)
class Guard:
    """`text` of `path`, which must be there once, becomes `without`; then `test` must fail."""

    invariant: int
    """Number in ARCHITECTURE.md, section "The ledger: invariants"."""
    what: str
    path: str
    text: str
    without: str
    test: str
