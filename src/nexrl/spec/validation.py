"""`spec.validation`: measurements of the policy on tasks that it does not train on."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from nexrl.spec.data import DataSpec
from nexrl.spec.section import CountOrZero, Seconds, Section, refuse


class ValidationSpec(Section):
    """Measuring the policy on tasks that it does not train on."""

    type: Literal["default"] = Field(default="default", description="Mean of every reward component.")
    data: DataSpec = Field(
        description="Source of the validation tasks; a `python` factory is called with `validation`."
    )
    held_out: bool = Field(
        default=True, description="Whether training leaves out tasks whose prompt is also a validation prompt."
    )
    before_training: bool = Field(default=True, description="Whether policy version 0 is validated.")
    every_steps: CountOrZero = Field(
        default=0, description="Steps between validations; 0 = only at the end. There is always one at the end."
    )
    temperature: float = Field(default=0.0, ge=0, le=10, description="Sampling temperature; 0 = greedy.")
    samples_per_task: int = Field(
        default=1, ge=1, le=1024, description="Samples of each task; more than 1 requires a temperature above 0."
    )
    timeout_seconds: Seconds = Field(default=600.0, description="Longest time for one validation.")

    @field_validator("data")
    @classmethod
    def _has_no_sampler(cls, data: DataSpec) -> DataSpec:
        if data.sampler is not None:
            raise refuse("validation grants every task once; drop sampler")
        return data

    @field_validator("samples_per_task")
    @classmethod
    def _is_one_when_greedy(cls, samples_per_task: int, info: ValidationInfo) -> int:
        if samples_per_task > 1 and info.data.get("temperature") == 0:
            raise refuse("greedy samples are equal; use 1, or a temperature above 0")
        return samples_per_task
