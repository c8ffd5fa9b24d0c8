"""The guards of the ledger's invariants, how each is taken out, and the tests that must notice."""

from dataclasses import dataclass

POOL = "services/trajectory_pool/nexrl_trajectory_pool/"
LUA = POOL + "ledger.lua"
LEDGER = "tests/integration/test_ledger.py::"
SERVICE = "tests/integration/test_trajectory_pool.py::"
HISTORIES = "tests/integration/test_ledger_properties.py"
AUDIT = "tests/integration/test_ledger_audit.py"
RESULTS = "tests/unit/nexrl_trajectory_pool/test_results.py"


@dataclass(frozen=True)
class Guard:
    """`text` of `path`, which must be there once, becomes `without`; then `test` must fail."""

    invariant: int
    """Number in ARCHITECTURE.md, section "The ledger: invariants"."""
    what: str
    path: str
    text: str
    without: str
    test: str


GUARDS = (
    Guard(1, "a drop is counted", LUA, 'add("dropped:" .. reason, 1)', "", AUDIT),
    Guard(
        1, "a sample enters a batch only as produced", LUA, 'assert(r and r.state == "produced"', "assert(true", AUDIT
    ),
    Guard(1, "the audit looks where a row points", POOL + "audit.py", "if not is_right:", "if False:", AUDIT),
    Guard(1, "the audit counts again", POOL + "audit.py", "if counted[name] != meta.get(name, 0):", "if False:", AUDIT),
    Guard(1, "the audit misses no group", POOL + "audit.py", "if numbers[number] != 1:", "if False:", AUDIT),
    Guard(
        1,
        "the audit knows how large a batch was",
        POOL + "audit.py",
        "elif held[batch] != sizes.get(batch):",
        "elif False:",
        AUDIT,
    ),
    Guard(1, "where samples went is kept", LUA, "if not a.unlimited then remember(group) end", "", AUDIT),
    Guard(
        2,
        "a write of an earlier attempt is fenced off",
        LUA,
        "if not r or r.attempt ~= result.attempt then",
        "if not r then",
        LEDGER + "test_a_lost_lease_is_granted_again_and_the_late_write_is_fenced_off",
    ),
    Guard(
        2,
        "a lease ends at its deadline",
        LUA,
        'lose_sample(group, k, row(group, k), "worker_lost")',
        "",
        LEDGER + "test_a_lost_lease_is_granted_again_and_the_late_write_is_fenced_off",
    ),
    Guard(
        2,
        "a renewal moves the deadline",
        LUA,
        'redis.call("ZADD", key("lease"), now + a.lease_seconds, sample[1])',
        "",
        LEDGER + "test_a_renewed_lease_is_kept",
    ),
    Guard(
        2,
        "an earlier lease of a batch is fenced off",
        LUA,
        "return b[1], tonumber(b[2] or -1) == attempt",
        "return b[1], true",
        LEDGER + "test_a_lost_batch_is_leased_again_and_its_late_train_batch_refused",
    ),
    Guard(
        2,
        "an earlier trainer is fenced off",
        LUA,
        'if a.incarnation ~= count("incarnation") then',
        "if false then",
        LEDGER + "test_a_killed_trainer_replays_the_steps_that_no_checkpoint_contains",
    ),
    Guard(
        2,
        "a worker gets first the batch it is known to have",
        LUA,
        "local first = leased_to(a.worker) or",
        "local first =",
        LEDGER + "test_a_batch_is_leased_again_to_the_worker_that_is_known_to_have_it",
    ),
    Guard(
        3,
        "a repeated request gets the first answer",
        LUA,
        "if first_answer then return first_answer end",
        "",
        LEDGER + "test_a_repeated_lease_request_gets_the_first_answer",
    ),
    Guard(
        3,
        "an empty answer is not remembered",
        LUA,
        "and not result.error and not result.empty then",
        "and not result.error then",
        LEDGER + "test_an_empty_answer_is_not_remembered",
    ),
    Guard(
        3,
        "a sample stored once is not stored again",
        LUA,
        'if r.state == "produced" or r.state:match("^b%d") then',
        "if false then",
        SERVICE + "test_a_put_says_what_became_of_each_result",
    ),
    Guard(
        4,
        "retries have a limit",
        LUA,
        "if r.failures < a.max_attempts and",
        "if",
        LEDGER + "test_a_failed_sample_is_retried_up_to_its_limit",
    ),
    Guard(
        4,
        "the last sample that ends closes its group",
        LUA,
        "    close_group(group)\n",
        "",
        LEDGER + "test_a_sample_that_fails_for_good_leaves_a_smaller_group_in_the_batch",
    ),
    Guard(
        4,
        "an incomplete group is dropped where the policy says so",
        LUA,
        "if a.release_incomplete and #groups > 0 then",
        "if #groups > 0 then",
        LEDGER + "test_incomplete_groups_are_dropped_and_refilled_when_the_policy_says_so",
    ),
    Guard(
        4,
        "groups that nothing can fill any more are closed",
        LUA,
        "if stranded(size) then close_stranded() end",
        "",
        SERVICE + "test_groups_across_tasks_that_nothing_can_fill_are_released_smaller",
    ),
    Guard(
        5,
        "the credit limits what is granted",
        LUA,
        "math.min(budget, needed) - used",
        "needed - used",
        LEDGER + "test_credit_limits_what_is_granted_to_one_batch_when_strictly_on_policy",
    ),
    Guard(
        5,
        "nothing is granted that no step would train",
        LUA,
        "math.min(budget, needed) - used",
        "budget - used",
        LEDGER + "test_nothing_is_granted_that_no_step_would_train",
    ),
    Guard(
        5,
        "a group that is lost whole gives its credit back",
        LUA,
        "  refund(credit)\nend\n\n-- Every sample of the task has ended.",
        "end\n\n-- Every sample of the task has ended.",
        LEDGER + "test_a_group_that_is_lost_whole_is_replaced_by_a_new_one",
    ),
    Guard(
        6,
        "stale groups never enter a batch",
        LUA,
        "  drop_stale_groups(batch)\n",
        "",
        LEDGER + "test_a_stale_group_is_dropped_and_refilled_before_a_batch_is_formed",
    ),
    Guard(
        7,
        "steps are acknowledged in their order",
        LUA,
        'if a.step ~= count("trained_steps") then',
        "if false then",
        LEDGER + "test_steps_are_acknowledged_one_by_one",
    ),
    Guard(
        7,
        "a train batch is kept until a checkpoint contains its step",
        LUA,
        '  add("trained_steps", 1)\n',
        '  add("trained_steps", 1)\n  redis.call("DEL", key("tb:" .. a.step))\n',
        LEDGER + "test_a_killed_trainer_replays_the_steps_that_no_checkpoint_contains",
    ),
    Guard(
        7,
        "a checkpoint that the ledger cannot follow is refused",
        LUA,
        'if a.steps < count("durable_steps") or a.steps > count("trained_steps") then',
        "if false then",
        LEDGER + "test_a_checkpoint_older_than_the_ledger_is_refused",
    ),
    Guard(
        7,
        "a trainer resumes by putting back what no checkpoint has",
        LUA,
        '    redis.call("HSET", key("tb"), step, "queued")\n    add("trained", -samples)',
        '    add("trained", -samples)',
        LEDGER + "test_a_killed_trainer_replays_the_steps_that_no_checkpoint_contains",
    ),
    Guard(
        7,
        "a batch is in the order of its grants",
        LUA,
        "for _, leaf in ipairs(groups) do table.sort(leaf.samples, precedes) end",
        "",
        LEDGER + "test_a_batch_is_in_the_order_of_its_grants_whoever_was_first",
    ),
    Guard(
        8,
        "the move that acknowledges a batch stores its train batch",
        LUA,
        'redis.call("HSET", key("tb"), a.batch, "queued")',
        "",
        HISTORIES,
    ),
    Guard(
        9,
        "no group id is used twice",
        LUA,
        'if known[1] then ending = "-" .. life:sub(1, 6) end',
        "",
        LEDGER + "test_no_group_id_is_used_twice_however_far_back_redis_was_set",
    ),
    Guard(
        9,
        "a checkpoint without its ledger begins new ids",
        LUA,
        'if a.steps > 0 then redis.call("HSET", key("lives"), "life", "gone") end',
        "",
        LEDGER + "test_a_late_write_of_a_ledger_that_is_gone_is_fenced_off",
    ),
    Guard(
        9,
        "a train batch holds the samples of the ledger's batch",
        LUA,
        "  local refused = other_samples(a.batch)\n  if refused then return refused end\n",
        "",
        LEDGER + "test_a_train_batch_of_other_samples_than_the_ledgers_is_refused",
    ),
    Guard(
        9,
        "a step acknowledged is of the ledger's batch",
        LUA,
        "  if other then return other end\n",
        "",
        LEDGER + "test_a_step_made_of_other_samples_than_the_ledgers_is_not_acknowledged",
    ),
    Guard(
        9,
        "the same, when Redis forgets a batch in hand",
        LUA,
        "  if other then return other end\n",
        "",
        HISTORIES + "::test_a_step_in_hand_while_redis_forgets_its_batch_and_forms_another_is_not_in_the_weights",
    ),
    Guard(
        9,
        "a trainer ahead of the ledger is told so",
        LUA,
        '  if a.step > count("trained_steps") then',
        "  if false then",
        LEDGER + "test_a_trainer_ahead_of_the_ledger_is_told_so",
    ),
    Guard(
        10,
        "payloads are capped",
        LUA,
        'if count("payload_bytes") + bytes > a.max_payload_bytes then',
        "if false then",
        LEDGER + "test_payloads_beyond_the_limit_are_refused_whole_until_some_are_used_up",
    ),
    Guard(
        10,
        "what is dropped is not held any more",
        LUA,
        'add("payload_bytes", -tonumber(get(g, "bytes") or 0))',
        "",
        LEDGER + "test_what_is_dropped_or_granted_is_not_held_any_more",
    ),
    Guard(
        11,
        "a failure carries no trajectories",
        POOL + "results.py",
        "if result.verdict not in SCORED and result.trajectories:",
        "if False:",
        RESULTS,
    ),
    Guard(
        11,
        "one bad trajectory of a sample refuses all",
        POOL + "results.py",
        "for i, trajectory in enumerate(result.trajectories):",
        "for i, trajectory in enumerate(result.trajectories[:1]):",
        RESULTS,
    ),
)
