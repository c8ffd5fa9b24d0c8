-- Tasks: granting samples, taking them back, adding tasks by hand.
local EXPIRE_AT_ONCE = 200
local MAX_ADDED = 100000

local function lose_sample(task, k, r, verdict)
  local id = task .. "." .. k
  set_score(K.leases, id, nil)
  r.failures = r.failures + 1
  if r.failures < a.max_attempts and verdict ~= "cancelled_stale" then
    r.state = "open"
    set_row(task, k, r)
    push_back(K.open, id)
    add("leased", -1)
    add("open", 1)
    wake("tasks")
    return "RETRIED"
  end
  increase(K.task .. task, "lost", 1)
  keep_rows(task)
  drop(task, k, "leased", verdict)
  end_sample(task)
  settle(task, 1)
  return "ACCEPTED"
end

local function offer_batch_again(batch)
  set_score(K.batch_leases, batch, nil)
  set(K.batch .. batch, "state", "formed")
  set_score(K.formed, batch, tonumber(batch))
end

-- Ends expired leases. Returns the number of expired sample leases.
local function expire()
  local ids = redis.call("ZRANGEBYSCORE", K.leases, "-inf", now, "LIMIT", 0, EXPIRE_AT_ONCE)
  for _, id in ipairs(ids) do
    local task, k = split_id(id)
    local r = row(task, k)
    if r then lose_sample(task, k, r, "worker_lost") else set_score(K.leases, id, nil) end
    add("lease_expired", 1)
  end
  for _, batch in ipairs(redis.call("ZRANGEBYSCORE", K.batch_leases, "-inf", now)) do
    offer_batch_again(batch)
    add("lease_expired", 1)
    wake("batch")
  end
  return #ids
end

-- A Redis has another replication id after each restart and each take-over, when it may have lost its last writes.
local function this_life() return redis.call("INFO", "replication"):match("master_replid:(%x+)") end

-- Returns the suffix of new task ids. It changes whenever Redis restarts, so no id is reused after lost writes.
local function ending_from(number)
  local life = this_life()
  local known, ending = get(K.lives, "life"), get(K.lives, "ending") or ""
  if known ~= life then
    if known then
      ending = "-" .. life:sub(1, 6)
      set_counter("next_incarnation", math.floor(now * 1000)) -- above all incarnations that Redis may have lost
    end
    set(K.lives, "life", life)
    set(K.lives, "ending", ending)
    set(K.lives, string.format("%d", number), ending)
  end
  return ending
end

local ending

local function new_task()
  local number = add("next_task", 1) - 1
  ending = ending or ending_from(number)
  return number .. ending
end

-- What the sampler has drawn for the next task of the data: its id there if it is granted, false if it is left out, nil if
-- the sampler has to draw first. True without a sampler.
local function drawn()
  if not a.drawn then return true end
  return a.drawn.names[count("cursor") - a.drawn.first + 1]
end

local function issue(size)
  local task = new_task()
  local t = K.task .. task
  local item = length(K.added) > 0 and take_front(K.added, 1)[1]
  if item then
    set(t, "item", item)
    add("payload_bytes", -#item)
  else
    if a.drawn then set(t, "name", drawn()) end
    set(t, "pos", add("cursor", 1) - 1)
    add("unused", 1)
  end
  set(t, "n", size)
  set(t, "left", size)
  for k = 0, size - 1 do
    set_row(task, k, { state = "open", attempt = 0, failures = 0 })
    push_back(K.open, task .. "." .. k)
  end
  add("granted", size)
  add("open", size)
end

local function take_open(samples)
  local taken = {}
  for _, id in ipairs(take_front(K.open, samples)) do
    local task, k = split_id(id)
    local r = row(task, k)
    r.state, r.attempt = "leased", r.attempt + 1
    set_row(task, k, r)
    set_score(K.leases, id, now + a.lease_seconds)
    taken[#taken + 1] = { id = id, task = task, attempt = r.attempt }
  end
  add("open", -#taken)
  add("leased", #taken)
  return taken
end

-- Training waits while a version is validated; validation samples are granted in a round only.
local function is_held()
  if a.unlimited then return not is_counted("round") end
  return now < count("hold_until")
end

local function can_lease()
  return not is_held() and (count("open") > 0 or (data_left() and credit() >= unit()))
end

local moves = {}

-- Passes over the tasks that the sampler leaves out, as far as it has drawn.
local function leave_out()
  if drawn() ~= false then return end
  while drawn() == false do
    add("cursor", 1)
    add("tasks_left_out", 1)
  end
  if not data_left() then wake_for_progress() end
end

local function needs_draw() return drawn() == nil and length(K.added) == 0 end

-- Issues new tasks until `samples` are open, as far as data, draws and credit go.
local function issue_up_to(samples)
  while count("open") < samples do
    leave_out()
    if not data_left() or needs_draw() then return end
    local free = credit()
    local size = a.samples_per_task
    if free < size and not a.scoped then size = free end
    if free < size or size < 1 then return end
    if count("open") > 0 and count("open") + size > samples then return end
    issue(size)
  end
end

local function waits_on()
  if not data_left() then return "data" end
  return needs_draw() and credit() >= unit() and "draw" or "credit"
end

function moves.lease_tasks()
  expire()
  if is_held() then return { empty = true, waiting_on = "validation", exhausted = false } end
  issue_up_to(a.max_samples)
  local leases, by_task = {}, {}
  for _, sample in ipairs(take_open(a.max_samples)) do
    local lease = by_task[sample.task]
    if not lease then
      local t = K.task .. sample.task
      lease = { task = sample.task, pos = tonumber(get(t, "pos") or -1), item = get(t, "item") or "", samples = {} }
      by_task[sample.task] = lease
      leases[#leases + 1] = lease
    end
    lease.samples[#lease.samples + 1] = { sample.id, sample.attempt }
  end
  if #leases == 0 then
    return { empty = true, waiting_on = waits_on(), exhausted = is_exhausted() }
  end
  return { leases = leases, deadline = now + a.lease_seconds }
end

-- Returns the row of a sample whose lease is still held by this attempt, else nil.
local function held_row(id, attempt)
  local task, k = split_id(id)
  local r = row(task, k)
  if r and r.state == "leased" and r.attempt == attempt then return r, task, k end
end

function moves.renew()
  local lost = {}
  for _, sample in ipairs(a.samples) do
    if held_row(sample[1], sample[2]) then
      set_score(K.leases, sample[1], now + a.lease_seconds)
    else
      lost[#lost + 1] = sample[1]
    end
  end
  return { lost = lost }
end

function moves.return_samples()
  local returned = 0
  for _, sample in ipairs(a.samples) do
    local r, task, k = held_row(sample[1], sample[2])
    if r then
      r.state = "open"
      set_row(task, k, r)
      set_score(K.leases, sample[1], nil)
      push_front(K.open, sample[1])
      returned = returned + 1
    end
  end
  add("leased", -returned)
  add("open", returned)
  wake("tasks")
  return { returned = returned }
end

function moves.add_task()
  if length(K.added) >= MAX_ADDED then
    return full("task: " .. MAX_ADDED .. " added tasks wait already")
  end
  local refused = no_room("task", #ARGV[5])
  if refused then return refused end
  if a.front then push_front(K.added, ARGV[5]) else push_back(K.added, ARGV[5]) end
  add("payload_bytes", #ARGV[5])
  wake("tasks")
  return {}
end

function moves.reset()
  if is_counted("round") then
    return fail("FAILED_PRECONDITION", "purpose: a validation round runs, and its tasks are granted once")
  end
  set_counter("cursor", 0)
  wake("tasks")
  return {}
end
