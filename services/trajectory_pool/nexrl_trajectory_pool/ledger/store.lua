-- The store: what a move reads comes from Redis at once; what it writes is kept here and sent when the move has ended.
-- So a move that raises has written nothing. A later read in the same move sees the earlier write.
--
-- KEYS[1]  prefix of all keys; one hash slot       ARGV[1]  name of the move
-- ARGV[2]  now in seconds, "" for Redis's clock    ARGV[3]  request id, "" for none
-- ARGV[4]  arguments (JSON)                        ARGV[5…] payloads (bytes)
--
-- Names of keys, counters and limits: names.py, which writes K. Keys, below the prefix:
--   meta                 hash    counters: samples by state, cursor, numbers of the next task and batch, versions
--   task:<id>            hash    pos | item: the data; n: samples granted; ended, left, lost, credited: counts; bytes: of
--                                its payloads; groups: their names; used: 1 once in a batch;
--                                s<k>: "state:attempt:failures"; v<k>: oldest policy version; r<k>: reward, if a rule
--                                needs it; name: id of its data, if there is a sampler
--   payloads:<task>      hash    k -> payload of a produced sample
--   history:<i>          hash    task -> where its samples went, HISTORY_TASKS tasks a key; kept as long as the experiment
--   batch_sizes          hash    batch -> number of samples, kept as long
--   dropped_batches      hash    batch -> reason, kept as long
--   lives                hash    life: of Redis when it granted the newest task; ending: of its id; <number of a life's
--                                first task>: their ending; version: life in which a version was reported last
--   task_rewards         hash    id of a task of the data -> mean reward of its newest grant that has ended, if there is a sampler
--   open                 list    samples that were granted once and wait to be granted again
--   added                list    tasks that were added by hand
--   leases               zset    leased samples by deadline
--   group:<name>         list    produced samples that wait for the rest of their group
--   groups               set     names of the groups that wait, where a group may span tasks
--   ready                list    groups that go into a batch together (JSON), oldest first
--   batch:<number>       hash    groups, n, state (formed, leased, acked), attempt, worker, cursor; ids: its samples in
--                                order; refilled: groups dropped for their equal rewards while it was being filled;
--                                sample_bytes, train_bytes: of its payloads; put_id; failures: of its training
--   formed               zset    batches that may be leased, by number
--   batch_leases         zset    leased batches by deadline
--   train_batch:<number> hash    number -> piece of its payload; train_batch:<number>:<id> while it is being put
--   train_batches        hash    batch -> queued | trained
--   last_failure         hash    sample, worker, verdict and error of the newest failed attempt, kept as long
--   request:<move>:<id>  string  answer to a request, kept REQUEST_SECONDS
--
-- States of a sample: open, leased, produced, b<batch>, -<reason> once dropped.
-- A task is one grant of a data item; its samples are the attempts at it; a group is what is compared with each other.
local move, request_id = ARGV[1], ARGV[3]
local a = cjson.decode(ARGV[4])

local now
if ARGV[2] ~= "" then
  now = tonumber(ARGV[2])
else
  local t = redis.call("TIME")
  now = tonumber(t[1]) + tonumber(t[2]) / 1e6
end

local writes, deleted, woken = {}, {}, {}

-- Keeps a command of `size` parts. They are checked here: no command may fail after the first one was sent.
local function keep(command, size)
  for i = 1, size do
    local kind = type(command[i])
    if kind ~= "string" and kind ~= "number" then error("part " .. i .. " of " .. command[1] .. " is a " .. kind) end
  end
  writes[#writes + 1] = command
end

local function write(...) keep({ ... }, select("#", ...)) end

-- Writes one command with many values, as many at a time as Lua can pass on.
local function write_many(command, name, values)
  for first = 1, #values, 1000 do
    local last = math.min(first + 999, #values)
    keep({ command, name, unpack(values, first, last) }, last - first + 3)
  end
end

local function wake(topic) woken[topic] = true end

-- hashes: read once and written once, however often a move changes them, because it is commands that take time ---------

local hashes = {}

local function hash_of(name)
  hashes[name] = hashes[name] or { fields = {}, changed = {}, removed = {} }
  return hashes[name]
end

local function read_hash(name)
  local hash = hashes[name]
  if hash and hash.is_read then return hash.fields end
  hash = hash_of(name)
  hash.is_read = true
  local flat = redis.call("HGETALL", name)
  for i = 1, #flat, 2 do
    local field = flat[i]
    if not hash.changed[field] and not hash.removed[field] then hash.fields[field] = flat[i + 1] end
  end
  return hash.fields
end

local function get(name, field) return read_hash(name)[field] end

-- Sets a field without reading the hash, which may be large.
local function set(name, field, value)
  local hash = hash_of(name)
  hash.fields[field], hash.changed[field], hash.removed[field] = value, true, nil
end

local function unset(name, field)
  local hash = hash_of(name)
  hash.fields[field], hash.changed[field], hash.removed[field] = nil, nil, true
end

local function increase(name, field, by)
  local value = tonumber(get(name, field) or 0) + by
  set(name, field, value)
  return value
end

local function write_hashes()
  for name, hash in pairs(hashes) do
    local removed, values = {}, {}
    for field in pairs(hash.removed) do removed[#removed + 1] = field end
    for field in pairs(hash.changed) do
      local value = hash.fields[field]
      values[#values + 1] = field
      values[#values + 1] = type(value) == "number" and string.format("%d", value) or value
    end
    write_many("HDEL", name, removed)
    write_many("HSET", name, values)
  end
end

-- lists: values are pushed at either end and taken from the front -------------------------------------------------------

local lists = {}

-- taken: how many values go from the front of what Redis holds; front, back: values to push; stored: what Redis holds and
-- keeps, once `filter` has read it.
local function list_of(name)
  lists[name] = lists[name] or { taken = 0, front = {}, back = {} }
  return lists[name]
end

local function push_back(name, value)
  local back = list_of(name).back
  back[#back + 1] = value
end

local function push_front(name, value)
  local front = list_of(name).front
  front[#front + 1] = value
end

local function length(name)
  local list = list_of(name)
  list.length = list.length or redis.call("LLEN", name)
  return list.length - list.taken + #list.front + #list.back
end

-- Drops the first values of a list, as many as `number`; those that Redis holds come first.
local function drop_front(name, number)
  local list, back = list_of(name), {}
  local from_redis = math.min(number, list.stored and #list.stored or number)
  list.taken = list.taken + from_redis
  for i = number - from_redis + 1, #list.back do back[#back + 1] = list.back[i] end
  list.back = back
end

local function take_front(name, most)
  local list = list_of(name)
  local values = redis.call("LRANGE", name, list.taken, list.taken + most - 1)
  list.taken = list.taken + #values
  local back = {}
  for _, value in ipairs(list.back) do
    local part = #values < most and values or back
    part[#part + 1] = value
  end
  list.back = back
  return values
end

local function without(values, is_gone)
  local kept = {}
  for i, value in ipairs(values) do
    if not is_gone[i] then kept[#kept + 1] = value end
  end
  return kept
end

-- Reads a whole list, and removes the values for which `is_kept` returns false.
local function filter(name, is_kept)
  local list = list_of(name)
  local stored, is_gone, gone = redis.call("LRANGE", name, 0, -1), {}, 0
  for i, value in ipairs(stored) do
    if not is_kept(value) then
      is_gone[i], gone = true, gone + 1
      if gone == i then list.taken = i else write("LREM", name, 1, value) end
    end
  end
  list.stored = gone > 0 and without(stored, is_gone) or stored
  local is_back_gone = {}
  for i, value in ipairs(list.back) do is_back_gone[i] = not is_kept(value) end
  list.back = without(list.back, is_back_gone)
end

-- The value at an index from 1 on, of a list that was filtered.
local function value_at(name, index)
  local list = list_of(name)
  return list.stored[index] or list.back[index - #list.stored]
end

local function write_lists()
  for name, list in pairs(lists) do
    if list.taken > 0 then write("LTRIM", name, list.taken, -1) end
    write_many("LPUSH", name, list.front)
    write_many("RPUSH", name, list.back)
  end
end

-- sorted sets -----------------------------------------------------------------------------------------------------------

local sorted = {}

local function sorted_of(name)
  sorted[name] = sorted[name] or { changed = {} }
  return sorted[name]
end

-- Sets the score of a member; nil removes it.
local function set_score(name, member, score)
  local set_of = sorted_of(name)
  set_of.changed[member] = score or false
  if set_of.scores then set_of.scores[member] = score end
end

-- All scores by member. For small sets only.
local function scores(name)
  local set_of = sorted_of(name)
  if not set_of.scores then
    set_of.scores = {}
    local flat = redis.call("ZRANGE", name, 0, -1, "WITHSCORES")
    for i = 1, #flat, 2 do set_of.scores[flat[i]] = tonumber(flat[i + 1]) end
    for member, score in pairs(set_of.changed) do set_of.scores[member] = score or nil end
  end
  return set_of.scores
end

-- The members of a small set, those with the lowest score first.
local function members(name)
  local found, by = {}, scores(name)
  for member in pairs(by) do found[#found + 1] = member end
  table.sort(found, function(one, other)
    if by[one] ~= by[other] then return by[one] < by[other] end
    return one < other
  end)
  return found
end

local function write_sorted()
  for name, set_of in pairs(sorted) do
    local removed, added = {}, {}
    for member, score in pairs(set_of.changed) do
      if score then
        added[#added + 1] = score
        added[#added + 1] = member
      else
        removed[#removed + 1] = member
      end
    end
    write_many("ZREM", name, removed)
    write_many("ZADD", name, added)
  end
end

-- any key ---------------------------------------------------------------------------------------------------------------

-- Deletes a key of any kind. What the move sets in it later is kept.
local function delete(name)
  deleted[#deleted + 1] = name
  hashes[name] = { fields = {}, changed = {}, removed = {}, is_read = true }
  lists[name] = { taken = 0, front = {}, back = {}, length = 0, stored = {} }
  sorted[name] = { changed = {}, scores = {} }
end

-- counters --------------------------------------------------------------------------------------------------------------

local META = K.meta

local function count(counter) return tonumber(get(META, counter) or 0) end
local function add(counter, by) return increase(META, counter, by) end
local function set_counter(counter, value) set(META, counter, value) end
local function unset_counter(counter) unset(META, counter) end
local function is_counted(counter) return get(META, counter) ~= nil end
local function add_dropped(reason, samples) increase(META, DROPPED .. reason, samples) end

-- answers ---------------------------------------------------------------------------------------------------------------

local FULL_RETRY_SECONDS = 1

local function fail(status, message) return { status = status, error = message } end
local function full(message)
  return { status = "RESOURCE_EXHAUSTED", error = message, retry_after = FULL_RETRY_SECONDS }
end
