-- Reading: counters, and the records for the audit. These moves change nothing.

function moves.state()
  return { meta = redis.call("HGETALL", META), credit = math.min(credit(), 2 ^ 53), can_lease = can_lease(),
           exhausted = is_exhausted(), queued = queued_train_batches(), added = length(K.added),
           unprocessed = redis.call("ZCARD", K.formed) + redis.call("ZCARD", K.batch_leases),
           last_failure = redis.call("HGETALL", K.last_failure) }
end

function moves.task_ids()
  return { tasks = task_ids(a.first, math.min(a.last, count("next_task") - 1)), next_task = count("next_task") }
end

-- Returns everything but the history, at one instant: of the tasks named, and of all from number `first` on, those that
-- have rows.
function moves.snapshot()
  local names = a.tasks
  for _, task in ipairs(task_ids(a.first, count("next_task") - 1)) do names[#names + 1] = task end
  local tasks, groups, batches, stored = {}, {}, {}, {}
  local function read_group(name) groups[name] = redis.call("LRANGE", K.group .. name, 0, -1) end
  for _, name in ipairs(redis.call("SMEMBERS", K.groups)) do read_group(name) end
  for _, task in ipairs(names) do
    local rows = redis.call("HGETALL", K.task .. task)
    if #rows > 0 then tasks[#tasks + 1] = { task, rows, redis.call("HKEYS", K.payloads .. task) } end
    for _, name in ipairs(cjson.decode(redis.call("HGET", K.task .. task, "groups") or "[]")) do read_group(name) end
  end
  for batch = count("durable_steps"), count("next_batch") - 1 do
    local name = string.format("%d", batch)
    batches[name] = redis.call("HGETALL", K.batch .. name)
    stored[name] = redis.call("HLEN", K.train_batch .. name)
  end
  return { meta = redis.call("HGETALL", META), tasks = tasks, groups = groups, batches = batches, stored = stored,
           open = redis.call("LRANGE", K.open, 0, -1), leases = redis.call("ZRANGE", K.leases, 0, -1),
           ready = redis.call("LRANGE", K.ready, 0, -1), train_batches = redis.call("HGETALL", K.train_batches),
           batch_sizes = redis.call("HGETALL", K.batch_sizes), dropped_batches = redis.call("HGETALL", K.dropped_batches) }
end
