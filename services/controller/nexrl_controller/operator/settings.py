"""Settings of the operator, read once from the environment (prefix NEXRL_OPERATOR_); the chart sets them."""

from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from nexrl.errors import InvalidArgumentError, Violation


class OperatorSettings(BaseSettings):
    """What the release has decided for all experiments."""

    model_config = SettingsConfigDict(env_prefix="NEXRL_OPERATOR_", frozen=True)

    namespace: str = Field(default="", description='Namespace whose experiments are run; "": all.')
    release_namespace: str = Field(default="", description='Namespace of the operator; "": that of this pod.')
    image_control: str = Field(description="Image of controller, trajectory pool and weight sync.")
    image_rollout: str = Field(description="Image of rollouts.")
    image_trainer: str = Field(description="Image of the trainer.")
    image_inference: str = Field(description="Image of the built-in engine.")
    image_vllm: str = Field(description="Image of vLLM.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(default="IfNotPresent", description="Of all.")
    redis_url: str = Field(description="Redis of experiments that name none.")
    redis_secret: str = Field(default="", description='"name/key" of its password in the release namespace; "": none.')
    tls: Literal["off", "operator", "certManager", "secret"] = Field(
        default="off", description="Who makes the certificates of experiments."
    )
    ca_secret: str = Field(default="", description="Mode operator: the Secret with the authority.")
    own_tls_secret: str = Field(default="", description="Mode certManager: the Secret with the operator's certificate.")
    issuer_name: str = Field(default="", description="Mode certManager: the Issuer.")
    issuer_kind: str = Field(default="Issuer", description="Mode certManager: Issuer or ClusterIssuer.")
    tls_secret: str = Field(default="", description="Mode secret: its name, in each namespace with experiments.")
    service_account: str = Field(default="", description='ServiceAccount of pods; "": default.')
    kueue: bool = Field(default=False, description="Whether experiments with a queue's name wait for Kueue.")
    token_reviews: bool = Field(default=True, description="Whether pods may have ServiceAccount tokens reviewed.")
    network_policy: bool = Field(default=True, description="Whether each experiment has a NetworkPolicy.")
    egress: list[dict[str, Any]] = Field(
        default=[], description="JSON: what pods of experiments may call outside, as egress rules of a NetworkPolicy."
    )
    lease_name: str = Field(default="nexrl-operator", description="The Lease of the leader.")
    deployment: str = Field(default="", description='Deployment of the operator, with which its Lease goes; "": none.')
    pod_name: str = Field(description="This pod; the holder's name in the Lease.")
    health_port: int = Field(default=9090, ge=0, le=65535, description="Port of /metrics, /healthz and /readyz.")


def load_operator_settings() -> OperatorSettings:
    """Read the environment. Raises InvalidArgumentError that names every variable that is missing or wrong."""
    try:
        return OperatorSettings()
    except ValidationError as error:
        violations = [Violation(f"NEXRL_OPERATOR_{e['loc'][0]}".upper(), e["msg"]) for e in error.errors()]
        raise InvalidArgumentError("settings: " + "; ".join(map(str, violations)), violations=violations) from None
