-- The ledger: every move of a sample, atomic and idempotent. One script, so that a guarantee is in one place.
--
-- KEYS[1]  prefix of all keys; one hash slot       ARGV[1]  name of the move
-- ARGV[2]  now in seconds, "" for Redis's clock    ARGV[3]  request id, "" for none
-- ARGV[4]  arguments (JSON)                        ARGV[5…] payloads (bytes)
--
-- Keys, below the prefix:
--   meta        hash    counters: samples by state, cursor, numbers of the next group and batch, versions, payload_bytes
--   g:<group>   hash    pos | item: the task; n: size; ended, left, lost, credited: counts; leaves; used: 1 once in a batch;
--                       bytes: of its payloads; s<k>: "state:attempt:failures"; v<k>: oldest policy version
--   t:<group>   hash    k -> payload of a produced sample
--   done:<i>    hash    group -> where its samples went, HISTORY_GROUPS groups a key; kept until the experiment's keys expire
--   sizes       hash    batch -> number of samples, kept as long
--   lives       hash    life: of Redis when it granted the newest group; ending: of its id; <number of a life's first
--                       group>: their ending
--   open        list    samples that were granted once and wait to be granted again
--   items       list    tasks that were added by hand
--   lease       zset    leased samples by deadline
--   leaf:<name> list    produced samples that wait for their group
--   leaves      set     names of the leaves that wait, where a group may span tasks
--   ready       list    groups that go into a batch together (JSON), oldest first
--   b:<batch>   hash    groups, n, state (formed, leased, acked), attempt, worker, cursor; ids: its samples in order;
--                       sample_bytes, train_bytes: of its payloads
--   formed      zset    batches that may be leased, by number
--   batchlease  zset    leased batches by deadline
--   tb:<batch>  hash    number -> piece of a train batch's payload; tb:<batch>:<id> while it is being put
--   tb          hash    batch -> queued | trained
--   req:<move>:<id>     answer to a request, kept REQUEST_SECONDS
--
-- States of a sample: open, leased, produced, b<batch>, -<reason> once dropped.
local REQUEST_SECONDS = 120
local EXPIRE_AT_ONCE = 200
local MAX_ITEMS = 100000
local HISTORY_GROUPS = 256 -- small hashes are packed: a tenth of the memory
local FULL_RETRY_SECONDS = 1

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

-- The counters and the rows of a group are read once and written once, however often a move changes them: it is commands
-- that take time. Nothing else may write these hashes; `finish` puts them back, and wakes who waits.
local hashes, woken = {}, {}

local function fields_of(name)
  if not hashes[name] then
    local fields, flat = {}, redis.call("HGETALL", name)
    for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
    hashes[name] = { fields = fields, changed = {} }
  end
  return hashes[name]
end

local function get(name, field) return fields_of(name).fields[field] end

local function set(name, field, value)
  local hash = fields_of(name)
  hash.fields[field] = value
  hash.changed[field] = true
end

local function increase(name, field, by)
  local value = tonumber(get(name, field) or 0) + by
  set(name, field, value)
  return value
end

local function unset(name, field)
  if hashes[name] then hashes[name].fields[field], hashes[name].changed[field] = nil, nil end
  redis.call("HDEL", name, field)
end

-- Like set, of a hash that no move reads: what it holds is large, and stays where it is.
local function store(name, field, value)
  hashes[name] = hashes[name] or { fields = {}, changed = {} }
  set(name, field, value)
end

local function delete(name)
  hashes[name] = nil
  redis.call("DEL", name)
end

-- One command with many values, as many as Lua can pass on at a time.
local function call_with(command, name, values)
  for i = 1, #values, 1000 do redis.call(command, name, unpack(values, i, math.min(i + 999, #values))) end
end

local function finish()
  for name, hash in pairs(hashes) do
    local values = {}
    for field in pairs(hash.changed) do
      local value = hash.fields[field]
      values[#values + 1] = field
      values[#values + 1] = type(value) == "number" and string.format("%d", value) or value
    end
    call_with("HSET", name, values)
  end
  for topic in pairs(woken) do redis.call("PUBLISH", key("wake"), topic) end
end

local META = key("meta")
local function count(field) return tonumber(get(META, field) or 0) end
local function add(field, by) return increase(META, field, by) end
local function wake(topic) woken[topic] = true end

local function fail(status, message) return { status = status, error = message } end
local function full(message)
  return { status = "RESOURCE_EXHAUSTED", error = message, retry_after = FULL_RETRY_SECONDS }
end

-- rows of samples -------------------------------------------------------------------------------------------------

local parts = {}
local function split_id(id)
  if not parts[id] then parts[id] = { id:match("^([%w-]+)%.(%d+)$") } end
  return parts[id][1], parts[id][2]
end

local function group_ids(first, last)
  local lives, ids, ending, since = {}, {}, "", -1
  local flat = redis.call("HGETALL", key("lives"))
  for i = 1, #flat, 2 do
    local start = tonumber(flat[i]) or math.huge -- "life" and "ending" are no numbers
    lives[start] = flat[i + 1]
    if start <= first and start > since then since, ending = start, flat[i + 1] end
  end
  for number = first, last do
    ending = lives[number] or ending
    ids[#ids + 1] = string.format("%d", number) .. ending
  end
  return ids
end

local function number_of(group) return tonumber(group:match("^%d+")) end
local function history(group) return key("done:" .. math.floor(number_of(group) / HISTORY_GROUPS)) end

local function row(group, k)
  if not group then return nil end -- an id that is none
  local value = get(key("g:" .. group), "s" .. k)
  if not value then return nil end
  local state, attempt, failures = value:match("^([^:]+):(%d+):(%d+)$")
  return { state = state, attempt = tonumber(attempt), failures = tonumber(failures) }
end

local function set_row(group, k, r)
  set(key("g:" .. group), "s" .. k, string.format("%s:%d:%d", r.state, r.attempt, r.failures))
end

-- The first batch that holds a sample of a task of the data set has used up that task, and so has its loss.
local function use(group)
  local g = key("g:" .. group)
  if get(g, "pos") and not get(g, "used") then
    set(g, "used", 1)
    add("unused", -1)
  end
end

-- Where each sample of a group went: "8*b17" when all went there, else "b17,-stale,…" by index.
local function remember(group)
  local g = key("g:" .. group)
  local states, is_uniform = {}, true
  for k = 0, tonumber(get(g, "n")) - 1 do
    states[k + 1] = row(group, k).state
    is_uniform = is_uniform and states[k + 1] == states[1]
  end
  local record = is_uniform and #states .. "*" .. states[1] or table.concat(states, ",")
  redis.call("HSET", history(group), group, record)
end

-- A group's rows go when every sample of it is in an acknowledged batch or dropped; where they went stays.
local function settle(group, samples)
  local g = key("g:" .. group)
  if increase(g, "left", -samples) > 0 then return end
  use(group)
  if not a.unlimited then remember(group) end
  add("payload_bytes", -tonumber(get(g, "bytes") or 0))
  delete(g)
  delete(key("t:" .. group))
end

local function drop(group, k, from, reason)
  add(from, -1)
  add("dropped:" .. reason, 1)
  unset(key("t:" .. group), k) -- counted in payload_bytes until its group is settled
  local r = row(group, k)
  r.state = "-" .. reason
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
  return tonumber(get(META, "asked") or a.batch_size)
end

-- The trainer has something to use up, which makes room. Else what may make the next batch is never kept out.
local function can_leave()
  return not a.unlimited and (count("batched") > 0 or batch_credit(smallest_asked()) > 0)
end

local function no_room(field, bytes)
  if count("payload_bytes") + bytes > a.max_payload_bytes then
    return full(field .. ": " .. bytes .. " bytes; " .. count("payload_bytes") .. " are held and at most " ..
      string.format("%d", a.max_payload_bytes) .. " may be, by trajectoryPool.maxPayloadBytes or two thirds of Redis' " ..
      "maxmemory; try again when the trainer has used some up")
  end
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
      oldest = math.min(oldest, tonumber(get(key("g:" .. group), "v" .. k)))
      samples = samples + 1
    end
  end
  redis.call("RPUSH", key("ready"), cjson.encode({ groups = groups, oldest = oldest, credit = credit }))
  add("grouping", -samples)
  add("ready", samples)
  add("ready_credit", credit)
end

-- Leaves are put back by `keep_leaves` only if they wait still: most are filled by the put that begins them.
local waiting = {}

local function leaf(name)
  if not waiting[name] then
    local samples = redis.call("LRANGE", key("leaf:" .. name), 0, -1)
    waiting[name] = { name = name, samples = samples, kept = #samples }
  end
  return waiting[name]
end

local function take_leaf(name)
  local taken = leaf(name)
  waiting[name] = { name = name, samples = {}, kept = 0 }
  if taken.kept > 0 then
    redis.call("DEL", key("leaf:" .. name))
    redis.call("SREM", key("leaves"), name)
  end
  return { name = name, samples = taken.samples }
end

local function keep_leaves()
  for name, found in pairs(waiting) do
    local added = { unpack(found.samples, found.kept + 1) }
    call_with("RPUSH", key("leaf:" .. name), added)
    if #added > 0 and not a.scoped then redis.call("SADD", key("leaves"), name) end
  end
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
  local g, groups = key("g:" .. group), {}
  for _, name in ipairs(cjson.decode(get(g, "leaves") or "[]")) do
    local leaf = take_leaf(name)
    if #leaf.samples > 0 then groups[#groups + 1] = leaf end
  end
  close(groups, tonumber(get(g, "n")) - tonumber(get(g, "credited") or 0))
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
  if increase(g, "ended", 1) < tonumber(get(g, "n")) then return end
  increase(g, "left", 1) -- hold the row until the group is closed
  if a.scoped then
    close_group(group)
  else
    refund(tonumber(get(g, "lost") or 0))
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
  increase(key("g:" .. group), "lost", 1)
  increase(key("g:" .. group), "left", 1) -- hold the row until its end is counted
  drop(group, k, "leased", verdict)
  end_sample(group)
  settle(group, 1)
  return "ACCEPTED"
end

local function expire()
  for _, id in ipairs(redis.call("ZRANGEBYSCORE", key("lease"), "-inf", now, "LIMIT", 0, EXPIRE_AT_ONCE)) do
    local group, k = split_id(id)
    local r = row(group, k)
    if r then lose_sample(group, k, r, "worker_lost") else redis.call("ZREM", key("lease"), id) end
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

-- A Redis has another replication id after each restart and each take-over, whenever it may have lost its last writes.
local function this_life() return redis.call("INFO", "replication"):match("master_replid:(%x+)") end

-- No group id is used twice, not even by a Redis that counts again from where it was: each of its lives ends the ids of
-- its groups in its own way. A late write can only be of the task that it says.
local function ending_from(number)
  local life = this_life()
  local known = redis.call("HMGET", key("lives"), "life", "ending")
  local ending = known[2] or ""
  if known[1] ~= life then
    if known[1] then
      ending = "-" .. life:sub(1, 6)
      set(META, "next_incarnation", math.floor(now * 1000)) -- one that was given and forgotten is not given again
    end
    redis.call("HSET", key("lives"), "life", life, "ending", ending, number, ending)
  end
  return ending
end

local ending
local function new_group()
  local number = add("next_group", 1) - 1
  ending = ending or ending_from(number)
  return number .. ending
end

local function issue(size)
  local group = new_group()
  local g = key("g:" .. group)
  local item = redis.call("LPOP", key("items"))
  if item then
    set(g, "item", item)
    add("payload_bytes", -#item)
  else
    set(g, "pos", add("cursor", 1) - 1)
    add("unused", 1)
  end
  set(g, "n", size)
  set(g, "left", size)
  local ids = {}
  for k = 0, size - 1 do
    set_row(group, k, { state = "open", attempt = 0, failures = 0 })
    ids[k + 1] = group .. "." .. k
  end
  call_with("RPUSH", key("open"), ids)
  add("granted", size)
  add("open", size)
end

local function take_open(samples)
  local ids, taken, deadlines = redis.call("LRANGE", key("open"), 0, samples - 1), {}, {}
  for _, id in ipairs(ids) do
    local group, k = split_id(id)
    local r = row(group, k)
    r.state, r.attempt = "leased", r.attempt + 1
    set_row(group, k, r)
    deadlines[#deadlines + 1] = now + a.lease_seconds
    deadlines[#deadlines + 1] = id
    taken[#taken + 1] = { id = id, group = group, attempt = r.attempt }
  end
  redis.call("LTRIM", key("open"), #taken, -1)
  call_with("ZADD", key("lease"), deadlines)
  add("open", -#taken)
  add("leased", #taken)
  return taken
end

-- Training waits while a version is validated; validation samples are granted in a round only.
local function is_held()
  if a.unlimited then return not get(META, "round") end
  return now < count("hold_until")
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
      local g = key("g:" .. sample.group)
      lease = { group = sample.group, pos = tonumber(get(g, "pos") or -1), item = get(g, "item") or "", samples = {} }
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
    return full("task: " .. MAX_ITEMS .. " added tasks wait already")
  end
  local refused = no_room("task", #ARGV[5])
  if refused then return refused end
  redis.call(a.front and "LPUSH" or "RPUSH", key("items"), ARGV[5])
  add("payload_bytes", #ARGV[5])
  wake("tasks")
  return {}
end

function moves.reset()
  if get(META, "round") then return fail("FAILED_PRECONDITION", "purpose: a validation round is on, and its tasks are granted once") end
  set(META, "cursor", 0)
  wake("tasks")
  return {}
end

-- trajectories ----------------------------------------------------------------------------------------------------

local function join_leaf(group, id, name)
  local g = key("g:" .. group)
  if a.scoped then
    local leaves = cjson.decode(get(g, "leaves") or "[]")
    local is_known = false
    for _, known in ipairs(leaves) do is_known = is_known or known == name end
    if not is_known then
      leaves[#leaves + 1] = name
      set(g, "leaves", cjson.encode(leaves))
    end
  end
  local samples = leaf(name).samples
  samples[#samples + 1] = id
  if #samples >= a.leaf_size then
    increase(g, "credited", a.leaf_size)
    release({ take_leaf(name) }, a.leaf_size)
  end
end

local ended = {} -- samples whose leases have ended well

local function put_one(result, payload)
  local group, k = split_id(result.id)
  if not group then return "FENCED" end
  local r = row(group, k)
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
  if result.failure then return lose_sample(group, k, r, result.failure) end
  r.state = "produced"
  set_row(group, k, r)
  ended[#ended + 1] = result.id
  store(key("t:" .. group), k, payload)
  -- No version is newer than the steps made; one that says so would never be stale.
  set(key("g:" .. group), "v" .. k, math.min(result.oldest, math.max(version(), count("trained_steps"))))
  increase(key("g:" .. group), "bytes", #payload)
  add("payload_bytes", #payload)
  add("leased", -1)
  add("grouping", 1)
  if result.leaf then join_leaf(group, result.id, result.leaf) end
  end_sample(group)
  return "ACCEPTED"
end

function moves.put_samples()
  local bytes, outcomes = 0, {}
  for i, result in ipairs(a.results) do
    local r = row(split_id(result.id))
    if r and r.state == "leased" and r.attempt == result.attempt then bytes = bytes + #ARGV[4 + i] end
  end
  local refused = bytes > 0 and can_leave() and no_room("results", bytes)
  if refused then return refused end
  for i, result in ipairs(a.results) do
    outcomes[i] = put_one(result, ARGV[4 + i])
  end
  call_with("ZREM", key("lease"), ended)
  keep_leaves()
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
  for _, encoded in ipairs(redis.call("LRANGE", key("ready"), 0, -1)) do
    local oldest = tonumber(encoded:match('"oldest":%s*(%d+)')) -- much faster than to decode them all
    if batch - oldest > a.staleness then
      redis.call("LREM", key("ready"), 1, encoded)
      drop_stale(cjson.decode(encoded))
    end
  end
end

local function precedes(one, other)
  local one_group, one_k = split_id(one)
  local other_group, other_k = split_id(other)
  if one_group ~= other_group then return number_of(one_group) < number_of(other_group) end
  return tonumber(one_k) < tonumber(other_k)
end

-- Sorts a batch by what was granted, so that it does not depend on who came first; gives the sample ids in that order.
local function in_order(groups)
  for _, leaf in ipairs(groups) do table.sort(leaf.samples, precedes) end
  table.sort(groups, function(one, other) return precedes(one.samples[1], other.samples[1]) end)
  local ids = {}
  for _, leaf in ipairs(groups) do
    for _, id in ipairs(leaf.samples) do ids[#ids + 1] = id end
  end
  return ids
end

-- A sample enters one batch, once: anything else would be trained twice, and must not pass unseen. Gives its bytes.
local function take(id, batch)
  local group, k = split_id(id)
  local r = row(group, k)
  assert(r and r.state == "produced", "sample " .. id .. " enters batch " .. batch .. " as " .. (r and r.state or "unknown"))
  r.state = "b" .. batch
  set_row(group, k, r)
  use(group)
end

local function bytes_of(entry)
  local bytes = 0
  for _, leaf in ipairs(entry.groups) do
    for _, id in ipairs(leaf.samples) do
      local group, k = split_id(id)
      bytes = bytes + redis.call("HSTRLEN", key("t:" .. group), k)
    end
  end
  return bytes
end

local function form_batch(size)
  local batch = count("next_batch")
  if batch >= a.total_steps then return nil end
  drop_stale_groups(batch)
  if stranded(size) then close_stranded() end
  local wanted = batch_credit(size)
  if wanted == 0 then return nil end
  local groups, entries, taken, bytes = {}, 0, 0, 0
  while taken < wanted do
    local entry = cjson.decode(redis.call("LINDEX", key("ready"), entries))
    local more = bytes_of(entry)
    if entries > 0 and bytes + more > a.max_batch_bytes then break end
    entries, taken, bytes = entries + 1, taken + entry.credit, bytes + more
    for _, leaf in ipairs(entry.groups) do groups[#groups + 1] = leaf end
  end
  local ids = in_order(groups)
  local samples = #ids
  for _, id in ipairs(ids) do take(id, batch) end -- before anything is written: it may find what must not be
  redis.call("LTRIM", key("ready"), entries, -1)
  if taken > size then wake("tasks") end -- the batch used up more than its share: there is more to grant for the others
  add("ready", -samples)
  add("ready_credit", -taken)
  add("taken", taken)
  add("batched", samples)
  add("next_batch", 1)
  redis.call("HSET", key("b:" .. batch), "groups", cjson.encode(groups), "ids", table.concat(ids, " "), "n", samples,
    "state", "formed", "attempt", 0, "cursor", math.max(0, count("cursor") - count("unused")), "sample_bytes", bytes)
  redis.call("HSET", key("sizes"), batch, samples)
  redis.call("ZADD", key("formed"), batch, batch)
  return batch
end

local function no_batch()
  local is_last = used_up() and redis.call("ZCARD", key("batchlease")) == 0
  if is_last then wake("train") end
  return { empty = true, exhausted = is_last }
end

-- Who asks for a batch has none: it was started again, or Redis lost the write that had acknowledged it.
local function leased_to(worker)
  if worker == "" then return nil end
  for _, batch in ipairs(redis.call("ZRANGE", key("batchlease"), 0, -1)) do
    if redis.call("HGET", key("b:" .. batch), "worker") == worker then return batch end
  end
end

function moves.lease_batch()
  expire()
  local size = a.size or a.batch_size
  if size < smallest_asked() then set(META, "asked", size) end
  local first = leased_to(a.worker) or redis.call("ZRANGE", key("formed"), 0, 0)[1]
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
  redis.call("HSET", b, "state", "leased", "worker", a.worker)
  local attempt = redis.call("HINCRBY", b, "attempt", 1)
  local fields = redis.call("HMGET", b, "groups", "cursor", "sample_bytes")
  return { batch = tonumber(first), attempt = attempt, groups = cjson.decode(fields[1]), cursor = tonumber(fields[2]),
           bytes = tonumber(fields[3]) }
end

local function owned_batch(batch, attempt)
  local b = redis.call("HMGET", key("b:" .. batch), "state", "attempt")
  return b[1], tonumber(b[2] or -1) == attempt
end

-- A Redis that lost its last writes may have formed another batch of that number since.
local function other_samples(batch)
  if redis.call("HGET", key("b:" .. batch), "ids") ~= a.ids then
    return fail("ABORTED", "batch " .. batch .. ": sample_ids are not those of the ledger's batch of that number; lease it again")
  end
end

local function lease_lost(batch) return fail("ABORTED", "batch " .. batch .. ": the lease was lost") end

function moves.return_batch()
  local state, is_owner = owned_batch(a.batch, a.attempt)
  if state ~= "leased" or not is_owner then return lease_lost(a.batch) end
  redis.call("ZREM", key("batchlease"), a.batch)
  redis.call("HSET", key("b:" .. a.batch), "state", "formed")
  redis.call("ZADD", key("formed"), a.batch, a.batch)
  wake("batch")
  return {}
end

-- The batch is acknowledged in the move that stores its train batch: there is no instant at which neither holds it.
function moves.put_train_batch()
  local state, is_owner = owned_batch(a.batch, a.attempt)
  if (state ~= "leased" and state ~= "acked") or not is_owner then return lease_lost(a.batch) end
  local refused = other_samples(a.batch)
  if refused then return refused end
  if state == "acked" then return {} end
  if a.pieces > 1 and redis.call("HLEN", key(a.staged)) ~= a.pieces - 1 then
    return fail("UNAVAILABLE", "batch " .. a.batch .. ": Redis has lost pieces of its train batch; send it again")
  end
  local b, train = key("b:" .. a.batch), key("tb:" .. a.batch)
  redis.call("DEL", train)
  if a.pieces > 1 then
    redis.call("RENAME", key(a.staged), train)
    redis.call("PERSIST", train)
  end
  redis.call("HSET", train, a.pieces - 1, ARGV[5])
  add("payload_bytes", a.bytes)
  redis.call("HSET", key("tb"), a.batch, "queued")
  redis.call("ZREM", key("batchlease"), a.batch)
  redis.call("HSET", b, "state", "acked", "train_bytes", a.bytes, "put_id", a.put_id)
  local by_group = {}
  for id in redis.call("HGET", b, "ids"):gmatch("%S+") do
    local group = split_id(id)
    by_group[group] = (by_group[group] or 0) + 1
  end
  for group, samples in pairs(by_group) do settle(group, samples) end
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
  -- Whoever makes a step has acknowledged those before it; a ledger that does not know of them has lost writes.
  if a.step > count("trained_steps") then
    return fail("ABORTED", "step " .. a.step .. ": only " .. count("trained_steps") .. " steps are acknowledged; resume from a checkpoint")
  end
  if redis.call("HEXISTS", key("tb"), a.step) == 1 then
    return { pieces = redis.call("HLEN", key("tb:" .. a.step)), exhausted = false }
  end
  return { pieces = 0, exhausted = a.step >= count("next_batch") and used_up() }
end

function moves.ack_train_batch()
  local refused = fenced()
  if refused then return refused end
  local state = redis.call("HGET", key("tb"), a.step)
  if state == "trained" or a.step < count("durable_steps") then return {} end
  if not state then return fail("ABORTED", "step " .. a.step .. ": no such train batch") end
  if a.step ~= count("trained_steps") then
    return fail("ABORTED", "step " .. a.step .. ": step " .. count("trained_steps") .. " comes next")
  end
  local other = other_samples(a.step)
  if other then return other end
  -- The same samples may have been produced twice, and made into a train batch twice, if Redis forgot the first.
  if redis.call("HGET", key("b:" .. a.step), "put_id") ~= a.put_id then
    return fail("ABORTED", "step " .. a.step .. ": put_id is not that of the ledger's train batch; resume from a checkpoint")
  end
  local samples = tonumber(redis.call("HGET", key("b:" .. a.step), "n"))
  redis.call("HSET", key("tb"), a.step, "trained")
  add("batched", -samples)
  add("trained", samples)
  add("trained_steps", 1)
  add("kept", 1)
  wake("batch")
  -- Trained batches are kept until a checkpoint has them: only that makes room.
  return { checkpoint_wanted = 2 * count("payload_bytes") > a.max_payload_bytes }
end

function moves.commit_checkpoint()
  local refused = fenced()
  if refused then return refused end
  if a.steps > count("trained_steps") then
    return fail("FAILED_PRECONDITION", "steps " .. a.steps .. ": only " .. count("trained_steps") .. " were acknowledged")
  end
  for step = count("durable_steps"), a.steps - 1 do
    local batch = redis.call("HMGET", key("b:" .. step), "n", "train_bytes")
    add("durable", tonumber(batch[1]))
    add("kept", -1)
    add("payload_bytes", -tonumber(batch[2]))
    redis.call("HDEL", key("tb"), step)
    redis.call("DEL", key("tb:" .. step), key("b:" .. step))
  end
  if a.steps > count("durable_steps") then set(META, "durable_steps", a.steps) end
  return {}
end

-- A Redis that lost everything is granted from anew by workers who did not notice, from the start of the data, and their
-- samples may even be in batches, before the trainer is back to say where its checkpoint goes on.
local function forget_granted()
  local leaves = redis.call("SMEMBERS", key("leaves"))
  for _, group in ipairs(group_ids(0, count("next_group") - 1)) do
    for _, name in ipairs(cjson.decode(get(key("g:" .. group), "leaves") or "[]")) do leaves[#leaves + 1] = name end
    for _, name in ipairs({ key("g:" .. group), key("t:" .. group), history(group) }) do delete(name) end
  end
  for _, name in ipairs(leaves) do delete(key("leaf:" .. name)) end
  for batch = 0, count("next_batch") - 1 do
    for _, name in ipairs({ "b:", "tb:" }) do delete(key(name .. batch)) end
  end
  local names = { "meta", "sizes", "lives", "open", "items", "lease", "leaves", "ready", "formed", "batchlease", "tb" }
  for _, name in ipairs(names) do delete(key(name)) end
end

function moves.resume()
  if count("incarnation") == 0 and a.steps > 0 then forget_granted() end
  -- The first trainer says where this ledger begins, also when workers have leased before it came.
  if count("incarnation") == 0 and count("next_batch") == 0 then
    for _, field in ipairs({ "start_steps", "next_batch", "trained_steps", "durable_steps", "version" }) do
      set(META, field, a.steps)
    end
    set(META, "cursor", math.max(a.cursor, count("cursor")))
    -- A checkpoint without its ledger: whoever was granted something by the one that is gone must not be taken for ours.
    if a.steps > 0 then redis.call("HSET", key("lives"), "life", "gone") end
    redis.call("HSETNX", key("lives"), "life", this_life())
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
  set(META, "trained_steps", a.steps)
  -- The algorithm processor ends with its trainer: what it had leased is to be leased again, at once.
  for _, batch in ipairs(redis.call("ZRANGE", key("batchlease"), 0, -1)) do
    redis.call("ZREM", key("batchlease"), batch)
    redis.call("HSET", key("b:" .. batch), "state", "formed")
    redis.call("ZADD", key("formed"), batch, batch)
  end
  wake("batch")
  wake("train")
  set(META, "incarnation", math.max(count("incarnation") + 1, count("next_incarnation")))
  return { incarnation = count("incarnation"), replayed = replayed }
end

-- versions and validation -----------------------------------------------------------------------------------------

function moves.set_version()
  if a.version > count("version") or not get(META, "version") then
    set(META, "version", a.version)
    wake("tasks")
    tell_progress()
  end
  return { version = count("version") }
end

function moves.hold()
  set(META, "hold", a.version)
  set(META, "hold_until", math.ceil(now + a.hold_seconds))
  wake("tasks")
  return {}
end

function moves.unhold()
  if count("hold") == a.version then
    unset(META, "hold")
    unset(META, "hold_until")
  end
  wake("tasks")
  return {}
end

-- Group numbers go on from round to round, so that a late result of one round is none of the next.
local function forget_round()
  local next_group = count("next_group")
  for _, group in ipairs(group_ids(count("first_group"), next_group - 1)) do
    delete(key("g:" .. group))
    delete(key("t:" .. group))
  end
  for _, name in ipairs({ "meta", "open", "lease", "items" }) do delete(key(name)) end
  set(META, "first_group", next_group)
  set(META, "next_group", next_group)
end

function moves.begin_round()
  local running = get(META, "round")
  if running and tonumber(running) ~= a.version then
    return fail("FAILED_PRECONDITION", "policy_version: " .. a.version .. ": version " .. running .. " is being validated")
  end
  if not running then
    forget_round()
    set(META, "round", a.version)
  end
  wake("tasks")
  return {}
end

function moves.end_round()
  if tonumber(get(META, "round") or -1) == a.version then forget_round() end
  wake("ended")
  return {}
end

local function end_hold()
  if now < tonumber(get(META, "hold_until") or math.huge) then return end
  unset(META, "hold")
  unset(META, "hold_until")
  wake("tasks")
end

function moves.expire()
  expire()
  end_hold()
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

-- reading back ----------------------------------------------------------------------------------------------------

function moves.group_ids()
  return { groups = group_ids(a.first, math.min(a.last, count("next_group") - 1)), next_group = count("next_group") }
end

-- Everything but the history, at one instant: of the groups named, and of all from number `first` on, those that have rows.
function moves.snapshot()
  local names = a.groups
  for _, group in ipairs(group_ids(a.first, count("next_group") - 1)) do names[#names + 1] = group end
  local groups, leaves, batches, stored = {}, {}, {}, {}
  for _, name in ipairs(redis.call("SMEMBERS", key("leaves"))) do leaves[name] = redis.call("LRANGE", key("leaf:" .. name), 0, -1) end
  for _, group in ipairs(names) do
    local rows = redis.call("HGETALL", key("g:" .. group))
    if #rows > 0 then groups[#groups + 1] = { group, rows, redis.call("HKEYS", key("t:" .. group)) } end
    for _, name in ipairs(cjson.decode(redis.call("HGET", key("g:" .. group), "leaves") or "[]")) do
      leaves[name] = redis.call("LRANGE", key("leaf:" .. name), 0, -1)
    end
  end
  for batch = count("durable_steps"), count("next_batch") - 1 do
    local name = string.format("%d", batch)
    batches[name] = redis.call("HGETALL", key("b:" .. name))
    stored[name] = redis.call("HLEN", key("tb:" .. name))
  end
  return { meta = redis.call("HGETALL", META), groups = groups, leaves = leaves, batches = batches, stored = stored,
           open = redis.call("LRANGE", key("open"), 0, -1), lease = redis.call("ZRANGE", key("lease"), 0, -1),
           ready = redis.call("LRANGE", key("ready"), 0, -1), train = redis.call("HGETALL", key("tb")),
           sizes = redis.call("HGETALL", key("sizes")) }
end

-- dispatch --------------------------------------------------------------------------------------------------------

local request = key("req:" .. move .. ":" .. request_id)
if request_id ~= "" then
  local first_answer = redis.call("GET", request)
  if first_answer then return first_answer end
end
local result = moves[move]()
finish()
local answer = cjson.encode(result)
-- An empty or refused request has changed nothing, and may be tried again under the same id.
if request_id ~= "" and not result.error and not result.empty then
  redis.call("SET", request, answer, "EX", REQUEST_SECONDS)
end
return answer
