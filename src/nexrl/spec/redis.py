"""`spec.redis`: the store of the ledger."""

from urllib.parse import parse_qs, urlsplit

from pydantic import Field, field_validator

from nexrl.spec.section import Section, refuse, with_port


class RedisSpec(Section):
    """The store of the ledger."""

    url: str | None = Field(
        default=None,
        pattern=r"^(rediss?(\+cluster)?|unix)://\S+$",
        max_length=1024,
        description="Redis to use, with its user, as `rediss://USER@HOST:PORT`; the password is NEXRL_REDIS_PASSWORD "
        "in the environment. `redis+cluster` or `rediss+cluster`: any node of a Redis Cluster. None = a private server "
        "for this run, or the cluster's. See docs/how-to/redis.md.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=604_800,
        ge=60,
        le=315_360_000,
        description="Time for which a shared Redis keeps the keys of the experiment after it has succeeded or failed; "
        "none = for ever. The keys of a private server stay in the run's folder.",
    )

    @field_validator("url")
    @classmethod
    def _holds_no_secret(cls, url: str | None) -> str | None:
        parts = urlsplit(with_port(url) or "")
        if parts.password or "password" in parse_qs(parts.query):
            raise refuse("contains a password, and many people read this file; set NEXRL_REDIS_PASSWORD instead")
        return url
