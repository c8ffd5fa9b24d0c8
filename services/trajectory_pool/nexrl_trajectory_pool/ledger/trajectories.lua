-- Trajectories: results of samples on their way in.

-- Counts an attempt that has finished. One that was called off as stale says nothing about the code that makes samples.
local function count_attempt(result)
  if result.failure == "cancelled_stale" then return end
  add("finished_attempts", 1)
  if not result.failure then return end
  add("failed_attempts", 1)
  set(K.last_failure, "sample", result.id)
  set(K.last_failure, "worker", a.worker)
  set(K.last_failure, "verdict", result.failure)
  set(K.last_failure, "error", result.error)
end

local function put_one(result, payload)
  local task, k = split_id(result.id)
  if not task then return "FENCED" end
  local r = row(task, k)
  if not r or r.attempt ~= result.attempt then
    add("fenced_writes", 1)
    return "FENCED"
  end
  if r.state == "produced" or r.state:match("^b%d") then
    add("duplicates_rejected", 1)
    return "DUPLICATE"
  end
  if r.state ~= "leased" then
    add("fenced_writes", 1)
    return "FENCED"
  end
  count_attempt(result)
  if result.failure then return lose_sample(task, k, r, result.failure) end
  r.state = "produced"
  set_row(task, k, r)
  set_score(K.leases, result.id, nil)
  set(K.payloads .. task, k, payload)
  set(K.task .. task, "v" .. k, result.oldest)
  increase(K.task .. task, "bytes", #payload)
  add("payload_bytes", #payload)
  add("leased", -1)
  add("grouping", 1)
  keep_rows(task)
  if result.group then join_group(task, k, result) end
  end_sample(task)
  settle(task, 1)
  return "ACCEPTED"
end

-- A step is acknowledged before its version is committed, so no engine serves a version above both numbers. A trainer that
-- replays steps makes trained_steps smaller, but not the versions that engines serve. A Redis that was started again may
-- have forgotten the newest versions. Clients repeat the call, and weight sync soon reports the committed version again.
local function unknown_version(index, result)
  local newest = math.max(version(), count("most_trained_steps"))
  if a.unlimited or (result.newest or 0) <= newest then return nil end
  local message = string.format("results[%d].trajectories.spans.policy_version: %d was never committed; " ..
    "the newest policy version is %d", index - 1, result.newest, newest)
  if get(K.lives, "version") == this_life() then return fail("INVALID_ARGUMENT", message) end
  return fail("UNAVAILABLE", message .. ", unless Redis lost its last writes; repeat the call until weight sync reports it")
end

function moves.put_samples()
  local bytes = 0
  for i, result in ipairs(a.results) do
    if held_row(result.id, result.attempt) then
      local refused = unknown_version(i, result)
      if refused then return refused end
      bytes = bytes + #ARGV[4 + i]
    end
  end
  local refused = bytes > 0 and can_leave() and no_room("results", bytes)
  if refused then return refused end
  local outcomes = {}
  for i, result in ipairs(a.results) do
    outcomes[i] = put_one(result, ARGV[4 + i])
  end
  return { outcomes = outcomes }
end
