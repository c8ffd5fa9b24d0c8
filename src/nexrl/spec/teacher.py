"""`spec.algorithm.teacher`: the model of on-policy distillation."""

from typing import Literal

from pydantic import Field

from nexrl.spec.model import PathModel
from nexrl.spec.section import Limit, Location, Section


class TeacherSpec(Section):
    """A frozen model that the policy learns from: on-policy distillation."""

    path: Location = Field(
        description="Local Hugging Face folder, relative to this file, as the checkpoint of another experiment, or "
        "`package:NAME`, as in model.path. It must have the tokenizer of the model."
    )
    coefficient: Limit = Field(
        default=1.0,
        description="Weight of log p_teacher - log p_rollout, which is added to the advantage of each token.",
    )

    def model(self, dtype: Literal["float32", "bfloat16"]) -> PathModel:
        """Return the teacher as a model whose weights have the number format `dtype`."""
        return PathModel(path=self.path, dtype=dtype)
