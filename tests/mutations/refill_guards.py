"""The guards of invariant 13: groups of equal rewards are refilled, within a limit."""

from tests.mutations.guard import LEDGER_REFILL, LUA, POOL, RESULTS, Guard

WAITS = LEDGER_REFILL + "test_a_batch_waits_for_a_group_that_takes_the_place_of_one_of_equal_rewards"
LIMIT = LEDGER_REFILL + "test_beyond_the_limit_groups_of_equal_rewards_fill_the_batch_and_the_next_may_refill_again"
ONCE = LEDGER_REFILL + "test_the_credit_of_a_dropped_group_is_returned_once"

REFILL_GUARDS = (
    Guard(
        13,
        "a group of equal rewards enters no batch",
        LUA + "groups.lua",
        "  if are_refilled(groups) then",
        "  if false then",
        WAITS,
    ),
    Guard(
        13,
        "a group whose rewards differ is not refilled",
        LUA + "groups.lua",
        "if not reward or reward ~= first then",
        "if not reward then",
        WAITS,
    ),
    Guard(
        13,
        "an unknown reward equals none",
        LUA + "groups.lua",
        "if not reward or reward ~= first then",
        "if reward ~= first then",
        LEDGER_REFILL + "test_an_unknown_reward_equals_none",
    ),
    Guard(
        13,
        "groups of one task are refilled together or not at all",
        LUA + "groups.lua",
        "    if not has_equal_rewards(group) then return false end",
        "    if has_equal_rewards(group) then return true end",
        LEDGER_REFILL + "test_groups_of_one_task_are_refilled_together_or_not_at_all",
    ),
    Guard(
        13,
        "refills have a limit",
        LUA + "groups.lua",
        'if count("refilled") + #groups > a.max_refilled then return false end',
        "",
        LIMIT,
    ),
    Guard(13, "refills are counted", LUA + "groups.lua", '    add("refilled", #groups)\n', "", LIMIT),
    Guard(13, "the limit is that of one batch", LUA + "batches.lua", '  set_counter("refilled", 0)\n', "", LIMIT),
    Guard(
        13,
        "a batch says how many groups were refilled for it",
        LUA + "batches.lua",
        ', refilled = count("refilled"),',
        ",",
        WAITS,
    ),
    Guard(
        13,
        "a group that is refilled gives its credit back",
        LUA + "groups.lua",
        "    return refund(cost)\n",
        "    return\n",
        WAITS,
    ),
    Guard(
        13,
        "its credit is given back once",
        LUA + "groups.lua",
        '    increase(t, "credited", a.group_size)\n',
        "",
        ONCE,
    ),
    Guard(
        13,
        "the rows of a task stay until its last sample has ended",
        LUA + "trajectories.lua",
        "  keep_rows(task)\n",
        "",
        ONCE,
    ),
    Guard(
        13,
        "the reward of a sample is that of its last trajectory, as for the trainer",
        POOL + "results.py",
        "reward = result.trajectories[-1].reward",
        "reward = result.trajectories[0].reward",
        RESULTS,
    ),
    Guard(
        13,
        "-0.0 equals 0.0",
        POOL + "results.py",
        "result.trajectories[-1].reward + 0.0",
        "result.trajectories[-1].reward",
        RESULTS,
    ),
)
