"""The controller's own Prometheus metrics; `logging_backends` has those of training."""

from prometheus_client import Counter, Enum, Gauge

from nexrl_controller.state import Phase

PHASE = Enum("nexrl_controller_phase", "Phase of the experiment.", states=[phase.value for phase in Phase])
TRAINING_STEP = Gauge("nexrl_controller_training_step", "Optimizer steps made.")
POLICY_VERSION = Gauge("nexrl_controller_policy_version", "Committed policy version; -1 for none.")
RESTARTS = Counter("nexrl_controller_restarts_total", "Restarts of components.", ["component"])
ERRORS = Counter("nexrl_controller_errors_total", "Errors reported.", ["severity"])
