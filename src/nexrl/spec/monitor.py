"""`spec.logger`, `spec.monitor` and `spec.failurePolicy`: where metrics go, and what errors lead to."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec.section import Seconds, Section, refuse


class LoggerSpec(Section):
    """Where metrics of the experiment go."""

    backends: tuple[Literal["console", "jsonl", "wandb"], ...] = Field(
        default=("console", "jsonl"),
        max_length=3,
        description="console: the live view; jsonl: metrics.jsonl in the run's folder; wandb: Weights & Biases.",
    )


class ErrorMonitorSpec(Section):
    """What errors reported by components lead to."""

    enabled: bool = Field(default=True, description="Whether reported errors can stop the experiment.")
    policy: Literal["stop_on_error", "continue", "stop_on_critical"] = Field(
        default="stop_on_critical",
        description="Which severity stops the experiment: ERROR or CRITICAL, none, or CRITICAL only.",
    )


class HealthMonitorSpec(Section):
    """Whether components are alive."""

    enabled: bool = Field(default=True, description="Whether a component without heartbeats is reported as an error.")
    check_interval_seconds: Seconds = Field(default=5.0, description="Time between two heartbeats of a component.")
    timeout_seconds: Seconds = Field(
        default=30.0,
        description="Time without a heartbeat after which a component counts as dead; longer than the interval.",
    )
    stall_deadline_seconds: Seconds = Field(
        default=7200.0,
        description="Longest time without a new training step, also before the first; then the experiment fails.",
    )

    @field_validator("timeout_seconds")
    @classmethod
    def _exceeds_interval(cls, timeout_seconds: float, info: ValidationInfo) -> float:
        interval_seconds = info.data.get("check_interval_seconds")
        if interval_seconds is not None and timeout_seconds <= interval_seconds:
            raise refuse(f"must be above checkIntervalSeconds ({interval_seconds:g})")
        return timeout_seconds


class MonitorSpec(Section):
    """Errors and health."""

    errors: ErrorMonitorSpec = Field(default_factory=ErrorMonitorSpec, description="Reaction to reported errors.")
    health: HealthMonitorSpec = Field(default_factory=HealthMonitorSpec, description="Heartbeats.")


class FailureRule(Section):
    """What an exit of a process leads to."""

    exit_codes: tuple[Annotated[int, Field(ge=-64, le=255)], ...] = Field(
        min_length=1, max_length=32, description="Exit codes; -9 is the signal SIGKILL."
    )
    action: Literal["Fail", "Ignore", "Count"] = Field(description="What follows.")
    components: tuple[
        Literal["controller", "data-reader", "trajectory-pool", "weight-sync", "trainer", "inference", "rollout"], ...
    ] = Field(default=(), max_length=7, description="Components whose processes it applies to; none = all.")


class FailurePolicySpec(Section):
    """How often components are restarted."""

    max_restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="Restarts of each component before the experiment fails. The count returns to 0 with each new "
        "checkpoint; on one machine, that of the controller and of Redis with each new step. Exit codes 6 and 8 (a "
        "peer is unreachable, or Redis lost its last writes) are not counted.",
    )
    rules: tuple[FailureRule, ...] = Field(
        default=(),
        max_length=16,
        description="What an exit leads to. The first rule decides that has its exit code (-9: SIGKILL) and its "
        "component (no components: every one). Fail: the experiment fails; Ignore: a restart that is not counted; "
        "Count: a restart up to maxRestarts. Exits without a rule: 2 Fail, 6 and 8 Ignore, all others Count. See "
        "docs/exit-codes.md.",
    )
