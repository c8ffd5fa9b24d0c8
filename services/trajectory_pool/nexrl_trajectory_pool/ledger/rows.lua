-- Rows of samples and their tasks.

local parts = {}

-- Splits "<task>.<index>"; returns nil for what is no sample id.
local function split_id(id)
  if not parts[id] then parts[id] = { id:match("^([%w-]+)%.(%d+)$") } end
  return parts[id][1], parts[id][2]
end

local function number_of(task) return tonumber(task:match("^%d+")) end

-- The ids of the tasks with these numbers: each life of Redis ends them in its own way.
local function task_ids(first, last)
  local lives, ids, ending, since = {}, {}, "", -1
  for field, value in pairs(read_hash(K.lives)) do
    local start = tonumber(field) or math.huge -- the other fields are no numbers
    lives[start] = value
    if start <= first and start > since then since, ending = start, value end
  end
  for number = first, last do
    ending = lives[number] or ending
    ids[#ids + 1] = string.format("%d", number) .. ending
  end
  return ids
end

local function history(task) return K.history .. math.floor(number_of(task) / HISTORY_TASKS) end

local function row(task, k)
  if not task then return nil end -- no sample id
  local value = get(K.task .. task, "s" .. k)
  if not value then return nil end
  local state, attempt, failures = value:match("^([^:]+):(%d+):(%d+)$")
  return { state = state, attempt = tonumber(attempt), failures = tonumber(failures) }
end

local function set_row(task, k, r)
  set(K.task .. task, "s" .. k, string.format("%s:%d:%d", r.state, r.attempt, r.failures))
end

-- A data item is used up once a sample of its task is in a batch, or dropped.
local function use(task)
  local t = K.task .. task
  if get(t, "pos") and not get(t, "used") then
    set(t, "used", 1)
    add("unused", -1)
  end
end

-- Records where each sample of a task went: "8*b17" when all went there, else "b17,-stale,…" by index.
local function remember(task)
  local t = K.task .. task
  local states, is_uniform = {}, true
  for k = 0, tonumber(get(t, "n")) - 1 do
    states[k + 1] = row(task, k).state
    is_uniform = is_uniform and states[k + 1] == states[1]
  end
  set(history(task), task, is_uniform and #states .. "*" .. states[1] or table.concat(states, ","))
end

-- Counts samples that are in an acknowledged batch or dropped. The rows of a task go with its last one; its history stays.
local function settle(task, samples)
  local t = K.task .. task
  if increase(t, "left", -samples) > 0 then return end
  use(task)
  if not a.unlimited then remember(task) end
  add("payload_bytes", -tonumber(get(t, "bytes") or 0))
  delete(t)
  delete(K.payloads .. task)
end

-- Prevents `settle` from deleting the rows of a task before a sample of it has ended, which another `settle` of 1 follows.
local function keep_rows(task) increase(K.task .. task, "left", 1) end

local function drop(task, k, from, reason)
  add(from, -1)
  add_dropped(reason, 1)
  unset(K.payloads .. task, k) -- counted in payload_bytes until its task is settled
  local r = row(task, k)
  r.state = "-" .. reason
  set_row(task, k, r)
  settle(task, 1)
end
