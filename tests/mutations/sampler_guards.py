"""The guards of invariant 14: tasks that a sampler leaves out are passed over, and no others."""

from tests.mutations.guard import LUA, Guard

SAMPLER = "tests/integration/test_task_sampler.py::"
PASSED = SAMPLER + "test_tasks_that_are_left_out_are_passed_over_and_cost_no_credit"
REWARD = SAMPLER + "test_the_reward_of_a_task_is_the_mean_of_its_newest_grant"

SAMPLER_GUARDS = (
    Guard(14, "a task that is left out is passed over", LUA + "tasks.lua", "    leave_out()\n", "", PASSED),
    Guard(14, "tasks that are left out are counted", LUA + "tasks.lua", '    add("tasks_left_out", 1)\n', "", PASSED),
    Guard(
        14,
        "no task is granted that was not drawn",
        LUA + "tasks.lua",
        "if not data_left() or needs_draw() then return end",
        "if not data_left() then return end",
        SAMPLER + "test_no_task_is_granted_that_was_not_drawn",
    ),
    Guard(
        14,
        "nobody draws for a task that the credit does not allow",
        LUA + "tasks.lua",
        'needs_draw() and credit() >= unit() and "draw"',
        'needs_draw() and "draw"',
        SAMPLER + "test_without_credit_nobody_waits_for_a_draw",
    ),
    Guard(
        14,
        "data that ends with tasks that are left out wakes the trainer",
        LUA + "tasks.lua",
        "  if not data_left() then wake_for_progress() end\n",
        "",
        SAMPLER + "test_the_trainer_learns_at_once_that_the_last_tasks_are_left_out",
    ),
    Guard(
        14,
        "the reward of a task waits for its last sample",
        LUA + "groups.lua",
        'if get(t, "name") then record_reward(t) end',
        "",
        REWARD,
    ),
    Guard(
        14,
        "a sampler needs the rewards of all samples",
        LUA + "groups.lua",
        'if a.max_refilled > 0 or get(t, "name") then',
        "if a.max_refilled > 0 then",
        REWARD,
    ),
    Guard(
        14,
        "a sample that failed has no part in the reward of its task",
        LUA + "groups.lua",
        "    if reward then sum,",
        "    if true then sum,",
        SAMPLER + "test_a_sample_that_fails_has_no_part_in_the_reward_of_its_task",
    ),
)
