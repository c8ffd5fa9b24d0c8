"""Settings of a service process, read once from the environment (prefix NEXRL_). Those of TLS: nexrl.tls."""

from pathlib import Path

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.errors import InvalidArgumentError, Violation

ALIVE = "alive"
"""The service that whoever wants to know only whether the event loop turns asks gRPC health for."""


class Settings(BaseSettings):
    """Where a service listens and where it finds the others. The same for all services; each reads what it needs."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_", frozen=True)

    experiment_file: Path = Field(description="The resolved experiment.")
    run_dir: Path = Field(description="Folder for checkpoints and logs of this experiment.")
    instance: str = Field(description="Name of this process, as 'rollout-0'.")
    listen: str = Field(default="127.0.0.1:0", description="gRPC address, host:port; port 0 takes a free one.")
    advertise: str = Field(default="", description="Host that others are told; by default that of NEXRL_LISTEN.")
    health_port: int = Field(default=0, ge=0, le=65535, description="Port for gRPC health without TLS; 0: none.")
    token_port: int = Field(
        default=0, ge=0, le=65535, description="Port for clients that show a token, no certificate; 0: none. Needs TLS."
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port for HTTP /metrics; 0 takes a free one.")
    http_port: int = Field(default=0, ge=0, le=65535, description="Port of an OpenAI-compatible API; 0: a free one.")
    redis_url: str = Field(default="", description="As redis.url of the experiment; its password is redis_password.")
    redis_is_private: bool = Field(default=False, description="Whether the run's folder holds the data of Redis.")
    controller: str = Field(default="", description="gRPC address of the controller.")
    trajectory_pool: str = Field(default="", description="gRPC address of the trajectory pool.")
    weight_sync: str = Field(default="", description="gRPC address of weight sync.")
    weights: str = Field(
        default="",
        description="Inference: serve the weights of this checkpoint as they are, without weight sync; a folder, or "
        "'initial' for those that training began with.",
    )
    read_only: bool = Field(default=False, description="Trajectory pool: let no lease run out; for looking only.")
    reflection: bool = Field(default=False, description="Serve gRPC reflection.")
    drain_seconds: float = Field(default=5.0, gt=0, description="Longest time in which calls may end after SIGTERM.")
    stop_seconds: float = Field(default=50.0, gt=0, description="Longest time to finish work in hand after SIGTERM.")
    log_level: str = Field(default="INFO", description="Level of the root logger.")

    @property
    def host(self) -> str:
        """The interface on which everything of this process listens."""
        return self.listen.rpartition(":")[0]

    @property
    def advertised(self) -> str:
        """The host at which others reach this process."""
        return self.advertise or self.host


class _Secrets(BaseSettings):
    """What must not be in a file that others read."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_", frozen=True)

    redis_password: SecretStr = Field(default=SecretStr(""), description="Password of the Redis user.")


def redis_password() -> str:
    """The password for Redis, of services and launcher alike; "" for none."""
    return _Secrets().redis_password.get_secret_value()


def load_settings() -> Settings:
    """Read the environment. Raises InvalidArgumentError that names every variable that is missing or wrong."""
    try:
        return Settings()
    except ValidationError as error:
        violations = [Violation(f"NEXRL_{e['loc'][0]}".upper(), e["msg"]) for e in error.errors()]
        raise InvalidArgumentError("settings: " + "; ".join(map(str, violations)), violations=violations) from None
