"""What only a cluster uses: templates of pods, the controller's pod, the volume, `spec.code`."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from nexrl.spec.section import NEVER, Name, Section, Text, refuse, with_port

ACCOUNT_KEYS = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")
"""Keys of a PodSpec that say whose rights the pod has."""


class TemplateMetadataSpec(Section):
    """What is added to the metadata of pods."""

    labels: dict[str, Text] = Field(default_factory=dict, max_length=64, description="More labels of the pods.")
    annotations: dict[str, Text] = Field(default_factory=dict, max_length=64, description="Annotations of the pods.")


class TemplateSpec(Section):
    """What is merged into the pods that the operator renders; unused on one machine."""

    metadata: TemplateMetadataSpec = Field(
        default_factory=TemplateMetadataSpec, description="Labels and annotations of the pods."
    )
    spec: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Part of a PodSpec: GPUs, tolerations, node selectors, volumes. Mappings are merged, lists of "
        "named items are merged by name, other values are replaced. The component's container is called nexrl.",
    )

    @field_validator("spec")
    @classmethod
    def _keeps_the_account(cls, spec: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if found := [key for key in ACCOUNT_KEYS if key in spec]:
            raise refuse(f"{found[0]}: must not be set: all pods use the ServiceAccount of the release; remove it")
        return spec


Template = Annotated[TemplateSpec | None, Field(description="Kubernetes: merged into the pods; none = no change.")]


class ControllerSpec(Section):
    """The process that leads the experiment."""

    template: Template = None


class StorageSpec(Section):
    """The run's folder (checkpoints, trajectories, metrics.jsonl, logs): its copy in object storage, and its volume.

    One machine uses no volume.
    """

    uri: Annotated[str, Field(pattern=r"^(s3://[^\s:@?#/]|file:///[^\s:@?#])[^\s:@?#]*$", max_length=1024)] | None = (
        Field(
            default=None,
            description="Folder in object storage to which the trainer copies the run's folder, below its own name, as "
            "`s3://bucket/prefix`. Without credentials: those are in the environment. None = no copy. See "
            "docs/how-to/object-storage.md.",
        )
    )
    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+$", max_length=1024)] | None = Field(
        default=None, description="S3-compatible server of `uri`, as `https://HOST:PORT`; none = that of the provider."
    )
    _endpoint_port = field_validator("endpoint")(with_port)
    secret_name: Name | None = Field(
        default=None,
        description="Kubernetes: Secret with the credentials of `uri`, as variables of the trainer's environment: "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION. None = those of the node or of the ServiceAccount.",
    )
    size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$", max_length=16), NEVER] = Field(
        default="10Gi", description="Size of the volume."
    )
    storage_class_name: Annotated[Name | None, NEVER] = Field(
        default=None, description="StorageClass of the volume; none = the cluster's default."
    )
    access_mode: Annotated[Literal["ReadWriteOnce", "ReadWriteMany"], NEVER] = Field(
        default="ReadWriteOnce",
        description="ReadWriteMany: the volume keeps the logs of all components but the data reader, and all metrics. "
        "ReadWriteOnce: it keeps only the trainer's log and "
        "metrics; validation's metrics and the other logs are lost with their pods.",
    )


CodeFiles = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,119}\.py$")], Annotated[str, Field(max_length=262_144)]
    ],
    Field(max_length=32),
]
