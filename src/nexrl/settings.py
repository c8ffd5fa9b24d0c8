"""Settings of a service process, read once from the environment (NEXRL_*). nexrl.tls has those of TLS."""

from pathlib import Path

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.errors import InvalidArgumentError, Violation

ALIVE = "alive"
"""Name of the gRPC health service that answers SERVING while the event loop runs, ready or not."""


REDIS_PASSWORD = "NEXRL_REDIS_PASSWORD"
"""The variable with the password of the Redis user."""


class Settings(BaseSettings):
    """Settings of all services. Each service uses those that it needs."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_", frozen=True)

    experiment_file: Path = Field(description="File with the resolved experiment.")
    run_dir: Path = Field(description="Folder for checkpoints and logs of this experiment.")
    instance: str = Field(description="Name of this process, for example 'rollout-0'.")
    keeps_log: bool = Field(
        default=False,
        description="Whether this process writes its log to a file of NEXRL_RUN_DIR as well. On one machine, its "
        "output is in that file already.",
    )
    keeps_metrics: bool = Field(
        default=False,
        description="Whether this process writes its metrics to metrics.jsonl of NEXRL_RUN_DIR, because the "
        "controller cannot.",
    )
    listen: str = Field(default="127.0.0.1:0", description="gRPC address, host:port; port 0 selects a free one.")
    advertise: str = Field(
        default="", description="Host that other processes connect to; default: that of NEXRL_LISTEN."
    )
    health_port: int = Field(default=0, ge=0, le=65535, description="Port for gRPC health without TLS; 0: none.")
    token_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port for clients with a token instead of a certificate; 0: none. Requires TLS.",
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port for HTTP /metrics; 0 selects a free one.")
    http_port: int = Field(
        default=0, ge=0, le=65535, description="Port of the OpenAI-compatible API; 0 selects a free one."
    )
    redis_url: str = Field(
        default="", description="URL of Redis, as redis.url of the experiment, without the password."
    )
    redis_is_managed: bool = Field(
        default=False,
        description="Whether launcher or operator decides how long keys stay in Redis, and not the controller.",
    )
    controller: str = Field(default="", description="gRPC address of the controller.")
    trajectory_pool: str = Field(default="", description="gRPC address of the trajectory pool.")
    data_reader: str = Field(default="", description="Trajectory pool: gRPC address of its data reader.")
    weight_sync: str = Field(default="", description="gRPC address of weight sync.")
    weights: str = Field(
        default="",
        description="Inference: serve these weights without weight sync; the folder of a checkpoint, or 'initial' for "
        "the weights that training began with.",
    )
    read_only: bool = Field(
        default=False, description="Trajectory pool: let no lease expire, so that reading changes nothing."
    )
    replica: int = Field(default=0, ge=0, le=63, description="Trainer: index of this replica, of trainer.replicas.")
    trainer_replicas: str = Field(
        default="",
        description="Trainer: gRPC addresses of the replicas 1, 2, ... in this order, separated by commas. Replica 0 "
        "calls them.",
    )
    gpu_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Inference with vLLM: share of the GPU's memory that it may take, as others use the GPU, too.",
    )
    reflection: bool = Field(default=False, description="Serve gRPC reflection.")
    drain_seconds: float = Field(
        default=5.0, gt=0, description="Longest time that calls in flight may take after SIGTERM."
    )
    stop_seconds: float = Field(
        default=50.0, gt=0, description="Longest time that work in progress may take after SIGTERM."
    )
    log_level: str = Field(default="INFO", description="Level of the root logger.")

    @property
    def host(self) -> str:
        """The interface that all servers of this process listen on."""
        return self.listen.rpartition(":")[0]

    @property
    def other_replicas(self) -> list[str]:
        """The addresses of the trainer's replicas 1, 2, ..."""
        return [address for address in self.trainer_replicas.split(",") if address]

    @property
    def advertised(self) -> str:
        """The host that other processes use to connect to this one."""
        return self.advertise or self.host


class _Secrets(BaseSettings):
    """Settings that must never be written to a file or a log."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_", frozen=True)

    redis_password: SecretStr = Field(default=SecretStr(""), description="Password of the Redis user.")


def redis_password() -> str:
    """Return the password for Redis; "" if there is none. Services and launcher use it."""
    return _Secrets().redis_password.get_secret_value()


def load_settings() -> Settings:
    """Read the settings. Raises InvalidArgumentError that names every missing or wrong variable."""
    try:
        return Settings()
    except ValidationError as error:
        violations = [Violation(f"NEXRL_{e['loc'][0]}".upper(), e["msg"]) for e in error.errors()]
        raise InvalidArgumentError("settings: " + "; ".join(map(str, violations)), violations=violations) from None
