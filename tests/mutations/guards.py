"""All guards of the ledger's invariants, how each is taken out, and the tests that must notice."""

from tests.mutations.refill_guards import REFILL_GUARDS
from tests.mutations.sample_guards import SAMPLE_GUARDS
from tests.mutations.sampler_guards import SAMPLER_GUARDS
from tests.mutations.step_guards import STEP_GUARDS

GUARDS = (*SAMPLE_GUARDS, *STEP_GUARDS, *REFILL_GUARDS, *SAMPLER_GUARDS)
