-- Policy versions and validation rounds.

function moves.set_version()
  set(K.lives, "version", this_life())
  if a.version > count("version") or not is_counted("version") then
    set_counter("version", a.version)
    wake("tasks")
    wake_for_progress()
  end
  return { version = count("version") }
end

local function end_hold()
  unset_counter("hold")
  unset_counter("hold_until")
end

function moves.hold()
  set_counter("hold", a.version)
  set_counter("hold_until", math.ceil(now + a.hold_seconds))
  wake("tasks")
  return {}
end

function moves.unhold()
  if count("hold") == a.version then end_hold() end
  wake("tasks")
  return {}
end

-- Task numbers go on from round to round, so that a late result of one round belongs to no task of the next.
local function forget_round()
  local next_task = count("next_task")
  for _, task in ipairs(task_ids(count("first_task"), next_task - 1)) do
    delete(K.task .. task)
    delete(K.payloads .. task)
  end
  for _, name in ipairs({ META, K.open, K.leases, K.added }) do delete(name) end
  set_counter("first_task", next_task)
  set_counter("next_task", next_task)
end

function moves.begin_round()
  local is_running = is_counted("round")
  if is_running and count("round") ~= a.version then
    return fail("FAILED_PRECONDITION", "policy_version: " .. a.version .. ": version " .. count("round") .. " is being validated")
  end
  if not is_running then
    forget_round()
    set_counter("round", a.version)
  end
  wake("tasks")
  return {}
end

function moves.end_round()
  if is_counted("round") and count("round") == a.version then forget_round() end
  wake("ended")
  return {}
end

function moves.expire()
  local expired = expire()
  if is_counted("hold_until") and now >= count("hold_until") then
    end_hold()
    wake("tasks")
  end
  -- Those that expired have the lowest deadlines.
  local first = redis.call("ZRANGE", K.leases, expired, expired, "WITHSCORES")[2]
  local batch = members(K.batch_leases)[1]
  local due = math.min(tonumber(first or "inf"), batch and scores(K.batch_leases)[batch] or math.huge)
  return { due_in = due < math.huge and math.max(0, due - now) or -1 }
end
