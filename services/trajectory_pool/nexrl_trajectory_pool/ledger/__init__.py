"""The ledger: every sample is accounted for, once. The moves are in the Lua files here; this gives them types.

open -> leased(attempt, deadline) -> produced(verdict) -> grouped -> batched -> trained(step) -> durable(checkpoint),
or dropped(reason). Each method is one atomic move; a repeated `request_id` gets the first answer.
"""

from nexrl_trajectory_pool.ledger.batches import Batches
from nexrl_trajectory_pool.ledger.reading import Reading
from nexrl_trajectory_pool.ledger.records import (
    SAMPLE_ID,
    UNLIMITED,
    Drawn,
    FailedAttempt,
    Grant,
    GrantedBatch,
    GrantedTask,
    LedgerRules,
    LedgerState,
    ProducedSample,
    SampleRecord,
)
from nexrl_trajectory_pool.ledger.samples import Samples
from nexrl_trajectory_pool.ledger.script import SCRIPT
from nexrl_trajectory_pool.ledger.train_batches import TrainBatches
from nexrl_trajectory_pool.ledger.versions import Versions

__all__ = [
    "SAMPLE_ID",
    "SCRIPT",
    "UNLIMITED",
    "Drawn",
    "FailedAttempt",
    "Grant",
    "GrantedBatch",
    "GrantedTask",
    "Ledger",
    "LedgerRules",
    "LedgerState",
    "ProducedSample",
    "SampleRecord",
]


class Ledger(Samples, Batches, TrainBatches, Versions, Reading):
    """The ledger of one model tag and purpose."""
