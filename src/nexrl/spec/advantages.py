"""Advantages by what they compare."""

TURN_BASELINE = "turn_mean_std"
"""The advantage that compares the turns of a group."""
GROUP_BASELINES = (
    "group_mean",
    "group_mean_std",
    "rloo",
    "group_mean_batch_std",
    "max_rl",
    "pass_at_k",
    TURN_BASELINE,
)
"""Advantages that compare the samples of a group."""
BATCH_BASELINES = ("batch_mean_std", "return_to_go")
"""Advantages that compare all samples of the batch, whatever their groups."""
DISTILLATION = "distillation"
"""The advantage that ignores rewards: only the teacher's term is left."""
ADVANTAGES = (*GROUP_BASELINES, *BATCH_BASELINES, DISTILLATION)
WITHOUT_ADVANTAGES = ("cross_entropy", "dpo")
"""Losses that do not use advantages."""

DESCRIPTION = (
    "group_mean: reward minus the mean of the group (Dr.GRPO). group_mean_std: that, divided by the "
    "group's standard deviation (GRPO). rloo: reward minus the mean of the others (RLOO). max_rl: reward minus the "
    "mean of the group, divided by that mean, for rewards of 0 and 1 (MaxRL). group_mean_batch_std: reward minus "
    "the mean of the group, divided by the standard deviation of these differences in the batch (REINFORCE++ with "
    "baseline). pass_at_k: for sets of passK samples of the group, each with its best reward: the mean over the "
    "sets that contain the sample, minus the mean over all, divided by their standard deviation (Pass@k training). "
    "batch_mean_std: reward minus the mean of the batch, divided by its standard deviation "
    "(REINFORCE++). return_to_go: for each token the rewards from it on, minus their mean over the tokens of the "
    "batch, divided by their standard deviation (REINFORCE++ with rewards of tokens). turn_mean_std: for each turn "
    "its reward minus the mean over the turns of the group, divided by their standard deviation, added up from "
    "the turn on (GRPO with process supervision). distillation: 0, so that the teacher alone decides. "
    "`module:name`: a nexrl.algorithm.Advantage of yours."
)
"""What each computes."""
