-- The ledger: every move of a sample, atomic and idempotent. One script, so that a guarantee is in one place.
--
-- KEYS[1]  prefix of all keys; one hash slot       ARGV[1]  name of the move
-- ARGV[2]  now in seconds, "" for Redis's clock    ARGV[3]  request id, "" for none
-- ARGV[4]  arguments (JSON)                        ARGV[5…] payloads (bytes)
--
-- Keys, below the prefix:
--   meta        hash    counters: samples by state, cursor, numbers of the next group and batch, versions
--   g:<group>   hash    pos | item: the task; n: size; ended, left, lost, credited: counts; leaves; used: 1 once in a batch;
--                       s<k>: "state:attempt:failures"; v<k>: oldest policy version
--   t:<group>   hash    k -> payload of a produced sample
--   open        list    samples that were granted once and wait to be granted again
--   items       list    tasks that were added by hand
--   lease       zset    leased samples by deadline
--   leaf:<name> list    produced samples that wait for their group
--   leaves      set     names of the leaves that wait, where a group may span tasks
--   ready       list    groups that go into a batch together (JSON), oldest first
--   b:<batch>   hash    groups, n, state (formed, leased, acked), attempt, cursor
--   formed      zset    batches that may be leased, by number
--   batchlease  zset    leased batches by deadline
--   tb:<batch>  string  payload of a train batch      tb    hash    batch -> queued | trained
--   req:<move>:<id>     answer to a request, kept REQUEST_SECONDS
local REQUEST_SECONDS = 120
local EXPIRE_AT_ONCE = 200
local MAX_ITEMS = 100000

local prefix, move, request_id = KEYS[1], ARGV[1], ARGV[3]
local a = cjson.decode(ARGV[4])
local function key(name) return prefix .. name end

local now
if ARGV[2] ~= "" then
  now = tonumber(ARGV[2])
else
  local t = redis.call("TIME")
  now = tonumber(t[1]) + tonumber(t[2]) / 1e6
end

local META = key("meta")
local function count(field) return tonumber(redis.call("HGET", META, field) or 0) end
local function add(field, by) return redis.call("HINCRBY", META, field, string.format("%d", by)) end
local function wake(topic) redis.call("PUBLISH", key("wake"), topic) end

local function fail(status, message) return { status = status, error = message } end

-- rows of samples -------------------------------------------------------------------------------------------------

local function split_id(id)
  local group, k = id:match("^(%d+)%.(%d+)$")
  return group, k
end

local function row(group, k)
  if not group then return nil end -- an id that is none
  local value = redis.call("HGET", key("g:" .. group), "s" .. k)
  if not value then return nil end
  local state, attempt, failures = value:match("^(%a+):(%d+):(%d+)$")
  return { state = state, attempt = tonumber(attempt), failures = tonumber(failures) }
end

local function set_row(group, k, r)
  redis.call("HSET", key("g:" .. group), "s" .. k, r.state .. ":" .. r.attempt .. ":" .. r.failures)
end

-- The first batch that holds a sample of a task of the data set has used up that task, and so has its loss.
local function use(group)
  local g = key("g:" .. group)
  if redis.call("HEXISTS", g, "pos") == 1 and redis.call("HSETNX", g, "used", 1) == 1 then add("unused", -1) end
end

-- A group's rows go when every sample of it is in an acknowledged batch or dropped.
local function settle(group, samples)
  if redis.call("HINCRBY", key("g:" .. group), "left", -samples) == 0 then
    use(group)
    redis.call("DEL", key("g:" .. group), key("t:" .. group))
  end
end

local function drop(group, k, from, reason)
  add(from, -1)
  add("dropped:" .. reason, 1)
  redis.call("HDEL", key("t:" .. group), k)
  local r = row(group, k)
  r.state = "dropped"
  set_row(group, k, r)
  settle(group, 1)
end

-- what may be granted and what may be batched -----------------------------------------------------------------------

local function version() return math.max(count("version"), 0) end

-- What the staleness budget allows, and no more than the steps to come can train.
local function credit()
  if a.unlimited then return math.huge end
  local used = count("granted") - count("refunded")
  local budget = (a.staleness + version() + 1 - count("start_steps")) * a.batch_size
  local needed = (a.total_steps - count("next_batch")) * a.batch_size + count("taken")
  return math.max(0, math.min(budget, needed) - used)
end

local function data_left()
  return redis.call("LLEN", key("items")) > 0 or a.positions < 0 or count("cursor") < a.positions
end

local function idle()
  return count("open") == 0 and count("leased") == 0
end

local function unit() return a.scoped and a.samples_per_task or 1 end

-- Nothing that is granted, or may be granted before another batch is trained, will add to what is ready.
local function is_final()
  return idle() and (not data_left() or (credit() < unit() and count("next_batch") <= version()))
end

-- What a batch of `size` may take from the ready groups now; 0 when it is to wait.
local function batch_credit(size)
  local ready = count("ready_credit")
  if ready == 0 then return 0 end
  if not is_final() then
    if a.needs_idle and not (idle() and credit() < unit()) then return 0 end
    if a.needs_size and ready < size then return 0 end
  end
  return a.needs_size and math.min(ready, size) or ready -- fewer than `size` in the last batch only
end

-- Groups that span tasks are stranded when nothing can fill them any more and a batch needs them.
local function stranded(size)
  return not a.scoped and not a.unlimited and count("grouping") > 0 and count("ready_credit") < size and is_final()
end

local function smallest_asked()
  return tonumber(redis.call("HGET", META, "asked") or a.batch_size)
end

local function exhausted()
  return not data_left() and idle()
end

-- Nothing is left that a batch could still be made of.
local function used_up()
  return exhausted() and count("ready") == 0 and (count("grouping") == 0 or a.unlimited)
end

local function refund(samples)
  if samples == 0 then return end
  add("refunded", samples)
  wake("tasks")
end

-- Wakes those who wait, and nobody in vain: a wake-up costs every waiter a look.
local function tell_progress()
  local size = smallest_asked()
  if batch_credit(size) > 0 or stranded(size) then wake("batch") end
  if exhausted() then
    wake("tasks")
    wake("batch")
    wake("train")
  end
end

-- groups ----------------------------------------------------------------------------------------------------------

-- `groups` go into a batch together: all leaves of one task, or one leaf that spans tasks. `credit` is what the batch
-- pays for them: as many samples as were granted, so that a task that lost samples still takes its place in the batch,
-- and one that is dropped whole gives its place back.
local function release(groups, credit)
  local oldest, samples = math.huge, 0
  for _, leaf in ipairs(groups) do
    for _, id in ipairs(leaf.samples) do
      local group, k = split_id(id)
      oldest = math.min(oldest, tonumber(redis.call("HGET", key("g:" .. group), "v" .. k)))
      samples = samples + 1
    end
  end
  redis.call("RPUSH", key("ready"), cjson.encode({ groups = groups, oldest = oldest, credit = credit }))
  add("grouping", -samples)
  add("ready", samples)
  add("ready_credit", credit)
end

local function take_leaf(name)
  local samples = redis.call("LRANGE", key("leaf:" .. name), 0, -1)
  redis.call("DEL", key("leaf:" .. name))
  redis.call("SREM", key("leaves"), name)
  return { name = name, samples = samples }
end

-- Incomplete groups are released smaller or dropped, by policy.
local function close(groups, credit)
  if a.release_incomplete and #groups > 0 then return release(groups, credit) end
  for _, leaf in ipairs(groups) do
    for _, id in ipairs(leaf.samples) do
      local group, k = split_id(id)
      drop(group, k, "grouping", "incomplete_group")
    end
  end
  refund(credit)
end

-- Every sample of the task has ended.
local function close_group(group)
  local g = redis.call("HMGET", key("g:" .. group), "n", "credited", "leaves")
  local groups = {}
  for _, name in ipairs(cjson.decode(g[3] or "[]")) do
    local leaf = take_leaf(name)
    if #leaf.samples > 0 then groups[#groups + 1] = leaf end
  end
  close(groups, tonumber(g[1]) - tonumber(g[2] or 0))
end

local function close_stranded()
  local names = redis.call("SMEMBERS", key("leaves"))
  table.sort(names)
  for _, name in ipairs(names) do
    local leaf = take_leaf(name)
    close({ leaf }, #leaf.samples)
  end
end

-- A sample has reached its end (produced or dropped); the last one of a group closes it.
local function end_sample(group)
  local g = key("g:" .. group)
  local size = tonumber(redis.call("HGET", g, "n"))
  if redis.call("HINCRBY", g, "ended", 1) < size then return end
  redis.call("HINCRBY", g, "left", 1) -- hold the row until the group is closed
  if a.scoped then
    close_group(group)
  else
    refund(tonumber(redis.call("HGET", g, "lost") or 0))
  end
  settle(group, 1)
  if a.unlimited then wake("ended") end
  tell_progress()
end

local function lose_sample(group, k, r, verdict)
  redis.call("ZREM", key("lease"), group .. "." .. k)
  r.failures = r.failures + 1
  if r.failures < a.max_attempts and verdict ~= "cancelled_stale" then
    r.state = "open"
    set_row(group, k, r)
    redis.call("RPUSH", key("open"), group .. "." .. k)
    add("leased", -1)
    add("open", 1)
    wake("tasks")
    return "RETRIED"
  end
  redis.call("HINCRBY", key("g:" .. group), "lost", 1)
  redis.call("HINCRBY", key("g:" .. group), "left", 1) -- hold the row until its end is counted
  drop(group, k, "leased", verdict)
  end_sample(group)
  settle(group, 1)
  return "ACCEPTED"
end

local function expire()
  for _, id in ipairs(redis.call("ZRANGEBYSCORE", key("lease"), "-inf", now, "LIMIT", 0, EXPIRE_AT_ONCE)) do
    local group, k = split_id(id)
    lose_sample(group, k, row(group, k), "worker_lost")
    add("lease_expired", 1)
  end
  for _, batch in ipairs(redis.call("ZRANGEBYSCORE", key("batchlease"), "-inf", now)) do
    redis.call("ZREM", key("batchlease"), batch)
    redis.call("HSET", key("b:" .. batch), "state", "formed")
    redis.call("ZADD", key("formed"), batch, batch)
    add("lease_expired", 1)
    wake("batch")
  end
end

-- tasks -----------------------------------------------------------------------------------------------------------

local function issue(size)
  local group = tostring(add("next_group", 1) - 1)
  local g = key("g:" .. group)
  local item = redis.call("LPOP", key("items"))
  if item then
    redis.call("HSET", g, "item", item)
  else
    redis.call("HSET", g, "pos", add("cursor", 1) - 1)
    add("unused", 1)
  end
  redis.call("HSET", g, "n", size, "left", size)
  for k = 0, size - 1 do
    set_row(group, k, { state = "open", attempt = 0, failures = 0 })
    redis.call("RPUSH", key("open"), group .. "." .. k)
  end
  add("granted", size)
  add("open", size)
end

local function take_open(samples)
  local taken = {}
  while #taken < samples do
    local id = redis.call("LPOP", key("open"))
    if not id then break end
    local group, k = split_id(id)
    local r = row(group, k)
    r.state, r.attempt = "leased", r.attempt + 1
    set_row(group, k, r)
    redis.call("ZADD", key("lease"), now + a.lease_seconds, id)
    taken[#taken + 1] = { id = id, group = group, attempt = r.attempt }
  end
  add("open", -#taken)
  add("leased", #taken)
  return taken
end

-- Training waits while a version is validated; validation samples are granted in a round only.
local function is_held()
  if a.unlimited then return not redis.call("HGET", META, "round") end
  return now < tonumber(redis.call("HGET", META, "hold_until") or 0)
end

local function can_lease()
  return not is_held() and (count("open") > 0 or (data_left() and credit() >= unit()))
end

local moves = {}

function moves.lease_tasks()
  expire()
  if is_held() then return { empty = true, waiting_on = "validation", exhausted = false } end
  while count("open") < a.max_samples and data_left() do
    local free = credit()
    local size = a.samples_per_task
    if free < size and not a.scoped then size = free end
    if free < size or size < 1 then break end
    if count("open") > 0 and count("open") + size > a.max_samples then break end
    issue(size)
  end
  local leases, by_group = {}, {}
  for _, sample in ipairs(take_open(a.max_samples)) do
    local lease = by_group[sample.group]
    if not lease then
      local task = redis.call("HMGET", key("g:" .. sample.group), "pos", "item")
      lease = { group = sample.group, pos = tonumber(task[1] or -1), item = task[2] or "", samples = {} }
      by_group[sample.group] = lease
      leases[#leases + 1] = lease
    end
    lease.samples[#lease.samples + 1] = { sample.id, sample.attempt }
  end
  if #leases == 0 then
    return { empty = true, waiting_on = data_left() and "credit" or "data", exhausted = exhausted() }
  end
  return { leases = leases, deadline = now + a.lease_seconds }
end

function moves.renew()
  local lost = {}
  for _, sample in ipairs(a.samples) do
    local group, k = split_id(sample[1])
    local r = row(group, k)
    if r and r.state == "leased" and r.attempt == sample[2] then
      redis.call("ZADD", key("lease"), now + a.lease_seconds, sample[1])
    else
      lost[#lost + 1] = sample[1]
    end
  end
  return { lost = lost }
end

function moves.return_samples()
  local returned = 0
  for _, sample in ipairs(a.samples) do
    local group, k = split_id(sample[1])
    local r = row(group, k)
    if r and r.state == "leased" and r.attempt == sample[2] then
      r.state = "open"
      set_row(group, k, r)
      redis.call("ZREM", key("lease"), sample[1])
      redis.call("LPUSH", key("open"), sample[1])
      returned = returned + 1
    end
  end
  add("leased", -returned)
  add("open", returned)
  wake("tasks")
  return { returned = returned }
end

function moves.add_task()
  if redis.call("LLEN", key("items")) >= MAX_ITEMS then
    return fail("RESOURCE_EXHAUSTED", "task: " .. MAX_ITEMS .. " added tasks wait already")
  end
  redis.call(a.front and "LPUSH" or "RPUSH", key("items"), ARGV[5])
  wake("tasks")
  return {}
end

function moves.reset()
  redis.call("HSET", META, "cursor", 0)
  wake("tasks")
  return {}
end

-- trajectories ----------------------------------------------------------------------------------------------------

local function join_leaf(group, id, name)
  local g = key("g:" .. group)
  if a.scoped then
    local leaves = cjson.decode(redis.call("HGET", g, "leaves") or "[]")
    local is_known = false
    for _, known in ipairs(leaves) do is_known = is_known or known == name end
    if not is_known then
      leaves[#leaves + 1] = name
      redis.call("HSET", g, "leaves", cjson.encode(leaves))
    end
  else
    redis.call("SADD", key("leaves"), name)
  end
  if redis.call("RPUSH", key("leaf:" .. name), id) >= a.leaf_size then
    redis.call("HINCRBY", g, "credited", a.leaf_size)
    release({ take_leaf(name) }, a.leaf_size)
  end
end

local function put_one(result, payload)
  local group, k = split_id(result.id)
  if not group then return "FENCED" end
  local r = row(group, k)
  if not r or r.attempt ~= result.attempt then
    add("fenced_writes", 1)
    return "FENCED"
  end
  if r.state == "produced" then
    add("duplicates_rejected", 1)
    return "DUPLICATE"
  end
  if r.state ~= "leased" then
    add("fenced_writes", 1)
    return "FENCED"
  end
  if result.failure then return lose_sample(group, k, r, result.failure) end
  r.state = "produced"
  set_row(group, k, r)
  redis.call("ZREM", key("lease"), result.id)
  redis.call("HSET", key("t:" .. group), k, payload)
  redis.call("HSET", key("g:" .. group), "v" .. k, result.oldest)
  add("leased", -1)
  add("grouping", 1)
  if result.leaf then join_leaf(group, result.id, result.leaf) end
  end_sample(group)
  return "ACCEPTED"
end

function moves.put_samples()
  local outcomes = {}
  for i, result in ipairs(a.results) do
    outcomes[i] = put_one(result, ARGV[4 + i])
  end
  return { outcomes = outcomes }
end

-- batches ---------------------------------------------------------------------------------------------------------

local function drop_stale(entry)
  for _, leaf in ipairs(entry.groups) do
    for _, id in ipairs(leaf.samples) do
      local group, k = split_id(id)
      drop(group, k, "ready", "stale")
    end
  end
  add("ready_credit", -entry.credit)
  refund(entry.credit)
end

-- Batch b is trained by step b, so how stale a group will be is known here, before anyone computes on it.
local function drop_stale_groups(batch)
  local entries = redis.call("LRANGE", key("ready"), 0, -1)
  for _, encoded in ipairs(entries) do
    local entry = cjson.decode(encoded)
    if batch - entry.oldest > a.staleness then
      redis.call("LREM", key("ready"), 1, encoded)
      drop_stale(entry)
    end
  end
end

local function form_batch(size)
  local batch = count("next_batch")
  if batch >= a.total_steps then return nil end
  drop_stale_groups(batch)
  if stranded(size) then close_stranded() end
  local wanted = batch_credit(size)
  if wanted == 0 then return nil end
  local groups, samples, taken = {}, 0, 0
  while taken < wanted do
    local entry = cjson.decode(redis.call("LPOP", key("ready")))
    taken = taken + entry.credit
    for _, leaf in ipairs(entry.groups) do
      groups[#groups + 1] = leaf
      samples = samples + #leaf.samples
      for _, id in ipairs(leaf.samples) do use((split_id(id))) end
    end
  end
  add("ready", -samples)
  add("ready_credit", -taken)
  add("taken", taken)
  add("batched", samples)
  add("next_batch", 1)
  redis.call("HSET", key("b:" .. batch), "groups", cjson.encode(groups), "n", samples, "state", "formed", "attempt", 0,
    "cursor", math.max(0, count("cursor") - count("unused")))
  redis.call("ZADD", key("formed"), batch, batch)
  return batch
end

local function no_batch()
  local is_last = used_up() and redis.call("ZCARD", key("batchlease")) == 0
  if is_last then wake("train") end
  return { empty = true, exhausted = is_last }
end

function moves.lease_batch()
  expire()
  local size = a.size or a.batch_size
  if size < smallest_asked() then redis.call("HSET", META, "asked", size) end
  local first = redis.call("ZRANGE", key("formed"), 0, 0)[1]
  if not first then
    if redis.call("ZCARD", key("batchlease")) + redis.call("HLEN", key("tb")) - count("kept") >= a.max_queued then
      return { empty = true, exhausted = false }
    end
    first = form_batch(size)
  end
  if not first then return no_batch() end
  local b = key("b:" .. first)
  redis.call("ZREM", key("formed"), first)
  redis.call("ZADD", key("batchlease"), now + a.lease_seconds, first)
  redis.call("HSET", b, "state", "leased")
  local attempt = redis.call("HINCRBY", b, "attempt", 1)
  local fields = redis.call("HMGET", b, "groups", "cursor")
  return { batch = tonumber(first), attempt = attempt, groups = cjson.decode(fields[1]), cursor = tonumber(fields[2]) }
end

local function owned_batch(batch, attempt)
  local b = redis.call("HMGET", key("b:" .. batch), "state", "attempt")
  return b[1], tonumber(b[2] or -1) == attempt
end

function moves.return_batch()
  local state, is_owner = owned_batch(a.batch, a.attempt)
  if state ~= "leased" or not is_owner then return fail("ABORTED", "batch " .. a.batch .. ": the lease was lost") end
  redis.call("ZREM", key("batchlease"), a.batch)
  redis.call("HSET", key("b:" .. a.batch), "state", "formed")
  redis.call("ZADD", key("formed"), a.batch, a.batch)
  wake("batch")
  return {}
end

-- The batch is acknowledged in the move that stores its train batch: there is no instant at which neither holds it.
function moves.put_train_batch()
  local state, is_owner = owned_batch(a.batch, a.attempt)
  if state == "acked" and is_owner then return {} end
  if state ~= "leased" or not is_owner then return fail("ABORTED", "batch " .. a.batch .. ": the lease was lost") end
  local b = key("b:" .. a.batch)
  redis.call("SET", key("tb:" .. a.batch), ARGV[5])
  redis.call("HSET", key("tb"), a.batch, "queued")
  redis.call("ZREM", key("batchlease"), a.batch)
  redis.call("HSET", b, "state", "acked")
  for _, leaf in ipairs(cjson.decode(redis.call("HGET", b, "groups"))) do
    for _, id in ipairs(leaf.samples) do settle(split_id(id), 1) end
  end
  wake("train")
  return {}
end

-- train batches ---------------------------------------------------------------------------------------------------

local function fenced()
  if a.incarnation ~= count("incarnation") then
    return fail("ABORTED", "trainer incarnation " .. a.incarnation .. ": a newer trainer, " .. count("incarnation") .. ", has taken over")
  end
end

function moves.lease_train_batch()
  local refused = fenced()
  if refused then return refused end
  if a.step < count("durable_steps") then
    return fail("FAILED_PRECONDITION", "step " .. a.step .. ": a committed checkpoint contains it")
  end
  if redis.call("HEXISTS", key("tb"), a.step) == 1 then return { found = true, exhausted = false } end
  return { found = false, exhausted = a.step >= count("next_batch") and used_up() }
end

function moves.ack_train_batch()
  local refused = fenced()
  if refused then return refused end
  local state = redis.call("HGET", key("tb"), a.step)
  if state == "trained" or a.step < count("durable_steps") then return {} end
  if not state then return fail("NOT_FOUND", "step " .. a.step .. ": no such train batch") end
  if a.step ~= count("trained_steps") then
    return fail("FAILED_PRECONDITION", "step " .. a.step .. ": step " .. count("trained_steps") .. " comes next")
  end
  local samples = tonumber(redis.call("HGET", key("b:" .. a.step), "n"))
  redis.call("HSET", key("tb"), a.step, "trained")
  add("batched", -samples)
  add("trained", samples)
  add("trained_steps", 1)
  add("kept", 1)
  wake("batch")
  return {}
end

function moves.commit_checkpoint()
  local refused = fenced()
  if refused then return refused end
  if a.steps > count("trained_steps") then
    return fail("FAILED_PRECONDITION", "steps " .. a.steps .. ": only " .. count("trained_steps") .. " were acknowledged")
  end
  for step = count("durable_steps"), a.steps - 1 do
    add("durable", tonumber(redis.call("HGET", key("b:" .. step), "n")))
    add("kept", -1)
    redis.call("HDEL", key("tb"), step)
    redis.call("DEL", key("tb:" .. step), key("b:" .. step))
  end
  if a.steps > count("durable_steps") then redis.call("HSET", META, "durable_steps", a.steps) end
  return {}
end

function moves.resume()
  -- The first trainer says where this ledger begins, also when workers have leased before it came.
  if count("incarnation") == 0 and count("next_batch") == 0 then
    redis.call("HSET", META, "start_steps", a.steps, "next_batch", a.steps, "trained_steps", a.steps,
      "durable_steps", a.steps, "cursor", math.max(a.cursor, count("cursor")), "version", a.steps)
    wake("tasks")
  end
  if a.steps < count("durable_steps") or a.steps > count("trained_steps") then
    return fail("FAILED_PRECONDITION", "steps " .. a.steps .. ": the ledger can resume from " .. count("durable_steps") ..
      " to " .. count("trained_steps") .. "; load such a checkpoint, or start under another name")
  end
  local replayed = 0
  for step = a.steps, count("trained_steps") - 1 do
    local samples = tonumber(redis.call("HGET", key("b:" .. step), "n"))
    redis.call("HSET", key("tb"), step, "queued")
    add("trained", -samples)
    add("batched", samples)
    add("kept", -1)
    replayed = replayed + 1
  end
  redis.call("HSET", META, "trained_steps", a.steps)
  -- The algorithm processor ends with its trainer: what it had leased is to be leased again, at once.
  for _, batch in ipairs(redis.call("ZRANGE", key("batchlease"), 0, -1)) do
    redis.call("ZREM", key("batchlease"), batch)
    redis.call("HSET", key("b:" .. batch), "state", "formed")
    redis.call("ZADD", key("formed"), batch, batch)
  end
  wake("batch")
  wake("train")
  return { incarnation = add("incarnation", 1), replayed = replayed }
end

-- versions and validation -----------------------------------------------------------------------------------------

function moves.set_version()
  if a.version > count("version") or not redis.call("HGET", META, "version") then
    redis.call("HSET", META, "version", a.version)
    wake("tasks")
    tell_progress()
  end
  return { version = count("version") }
end

function moves.hold()
  redis.call("HSET", META, "hold", a.version, "hold_until", string.format("%d", math.ceil(now + a.hold_seconds)))
  wake("tasks")
  return {}
end

function moves.unhold()
  if count("hold") == a.version then redis.call("HDEL", META, "hold", "hold_until") end
  wake("tasks")
  return {}
end

-- Group numbers go on from round to round, so that a late result of one round is none of the next.
local function forget_round()
  local next_group = count("next_group")
  for group = count("first_group"), next_group - 1 do redis.call("DEL", key("g:" .. group), key("t:" .. group)) end
  redis.call("DEL", META, key("open"), key("lease"), key("items"))
  redis.call("HSET", META, "first_group", next_group, "next_group", next_group)
end

function moves.begin_round()
  local running = redis.call("HGET", META, "round")
  if running and tonumber(running) ~= a.version then
    return fail("FAILED_PRECONDITION", "policy_version: " .. a.version .. ": version " .. running .. " is being validated")
  end
  if not running then
    forget_round()
    redis.call("HSET", META, "round", a.version)
  end
  wake("tasks")
  return {}
end

function moves.end_round()
  if tonumber(redis.call("HGET", META, "round") or -1) == a.version then forget_round() end
  wake("ended")
  return {}
end

function moves.expire()
  expire()
  local first = redis.call("ZRANGE", key("lease"), 0, 0, "WITHSCORES")[2]
  local batch = redis.call("ZRANGE", key("batchlease"), 0, 0, "WITHSCORES")[2]
  local due = math.min(tonumber(first or "inf"), tonumber(batch or "inf"))
  return { due_in = due < math.huge and math.max(0, due - now) or -1 }
end

function moves.state()
  return { meta = redis.call("HGETALL", META), credit = math.min(credit(), 2 ^ 53), can_lease = can_lease(),
           exhausted = exhausted(), queued = redis.call("HLEN", key("tb")) - count("kept"),
           added = redis.call("LLEN", key("items")),
           unprocessed = redis.call("ZCARD", key("formed")) + redis.call("ZCARD", key("batchlease")) }
end

-- dispatch --------------------------------------------------------------------------------------------------------

local request = key("req:" .. move .. ":" .. request_id)
if request_id ~= "" then
  local first_answer = redis.call("GET", request)
  if first_answer then return first_answer end
end
local result = moves[move]()
local answer = cjson.encode(result)
-- An empty or refused request has changed nothing, and may be tried again under the same id.
if request_id ~= "" and not result.error and not result.empty then
  redis.call("SET", request, answer, "EX", REQUEST_SECONDS)
end
return answer
