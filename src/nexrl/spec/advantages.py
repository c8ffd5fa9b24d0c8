"""Advantages by what they compare."""

GROUP_BASELINES = ("group_mean", "group_mean_std", "rloo", "group_mean_batch_std", "max_rl", "pass_at_k")
"""Advantages that compare the samples of a group."""
BATCH_BASELINES = ("batch_mean_std",)
"""Advantages that compare all samples of the batch, whatever their groups."""
DISTILLATION = "distillation"
"""The advantage that ignores rewards: only the teacher's term is left."""
ADVANTAGES = (*GROUP_BASELINES, *BATCH_BASELINES, DISTILLATION)
WITHOUT_ADVANTAGES = ("cross_entropy", "dpo")
"""Losses that do not use advantages."""
