"""Settings of the operator, read once from the environment (prefix NEXRL_OPERATOR_); the chart sets them."""

from typing import Any, Literal
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.errors import InvalidArgumentError, Violation


class OperatorSettings(BaseSettings):
    """The settings of the release for all experiments."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_OPERATOR_", frozen=True)

    namespace: str = Field(default="", description='Namespace whose experiments the operator runs; "": all.')
    release_namespace: str = Field(default="", description='Namespace of the operator; "": that of this pod.')
    image_control: str = Field(description="Image of controller, trajectory pool and weight sync.")
    image_rollout: str = Field(description="Image of rollouts.")
    image_trainer: str = Field(description="Image of the trainer.")
    image_inference: str = Field(description="Image of the built-in engine.")
    image_vllm: str = Field(description="Image of vLLM.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(default="IfNotPresent", description="Of all.")
    redis_url: str = Field(description="Redis of experiments without redis.url.")
    redis_secret: str = Field(default="", description='"name/key" of its password in the release namespace; "": none.')
    tls: Literal["off", "operator", "certManager", "secret"] = Field(
        default="off", description="How experiments get their certificates."
    )
    ca_secret: str = Field(default="", description="Mode operator: the Secret with the authority.")
    own_tls_secret: str = Field(default="", description="Mode certManager: the Secret with the operator's certificate.")
    issuer_name: str = Field(default="", description="Mode certManager: the Issuer.")
    issuer_kind: str = Field(default="Issuer", description="Mode certManager: Issuer or ClusterIssuer.")
    tls_secret: str = Field(default="", description="Mode secret: its name, in each namespace with experiments.")
    service_account: str = Field(default="", description='ServiceAccount of pods; "": default.')
    kueue: bool = Field(default=False, description="Whether experiments with the label of a queue wait for Kueue.")
    token_reviews: bool = Field(default=True, description="Whether pods may have ServiceAccount tokens reviewed.")
    network_policy: bool = Field(default=True, description="Whether each experiment has a NetworkPolicy.")
    disruption_budgets: bool = Field(
        default=False, description="Whether experiments have PodDisruptionBudgets; the operator then needs the right."
    )
    resources: dict[str, dict[str, dict[str, Any]]] = Field(
        default={}, description="JSON: requests and limits of containers by component; merged over the defaults."
    )
    egress: list[dict[str, Any]] = Field(
        default=[], description="JSON: egress rules of a NetworkPolicy for the pods of experiments."
    )
    lease_name: str = Field(default="nexrl-operator", description="The Lease of the leader.")
    deployment: str = Field(default="", description='Deployment of the operator, which owns its Lease; "": none.')
    pod_name: str = Field(description="Name of this pod; the holder in the Lease.")
    health_port: int = Field(default=9090, ge=0, le=65535, description="Port of /metrics, /healthz and /readyz.")

    def redis_url_of(self, user: str) -> str:
        """Return the URL of the release's Redis for one user, without the password."""
        parts = urlsplit(self.redis_url)
        return urlunsplit(parts._replace(netloc=f"{quote(user)}@{parts.netloc.rpartition('@')[2]}"))


def load_operator_settings() -> OperatorSettings:
    """Read the environment. Raises InvalidArgumentError, which names every missing or wrong variable."""
    try:
        return OperatorSettings()
    except ValidationError as error:
        violations = [Violation(f"NEXRL_OPERATOR_{e['loc'][0]}".upper(), e["msg"]) for e in error.errors()]
        raise InvalidArgumentError("settings: " + "; ".join(map(str, violations)), violations=violations) from None
