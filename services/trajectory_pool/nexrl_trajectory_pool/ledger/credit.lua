-- Credit: what may be granted, what may be batched, and how many bytes may be held.

local function version() return math.max(count("version"), 0) end

-- The staleness budget if there is one, and no more than the steps to come can train.
local function credit()
  if a.unlimited then return math.huge end
  local used = count("granted") - count("refunded")
  local steps = a.is_bounded_by_staleness and a.staleness + version() + 1 - count("start_steps") or math.huge
  local budget = steps * a.batch_size
  local needed = (a.total_steps - count("next_batch")) * a.batch_size + count("taken")
  return math.max(0, math.min(budget, needed) - used)
end

local function data_left()
  return a.positions < 0 or count("cursor") < a.positions or length(K.added) > 0
end

local function is_idle()
  return count("open") == 0 and count("leased") == 0
end

-- The fewest samples that can be granted at a time.
local function unit() return a.scoped and a.samples_per_task or 1 end

-- True if nothing that is granted, or may be granted before another batch is trained, can add to what is ready.
local function is_final()
  return is_idle() and (not data_left() or (credit() < unit() and count("next_batch") <= version()))
end

-- Returns what a batch of `size` may take from the ready groups now; 0 if it must wait.
local function batch_credit(size)
  local ready = count("ready_credit")
  if ready == 0 then return 0 end
  if not is_final() then
    if a.needs_idle and not (is_idle() and credit() < unit()) then return 0 end
    if a.needs_size and ready < size then return 0 end
  end
  return a.needs_size and math.min(ready, size) or ready -- fewer than `size` in the last batch only
end

-- True if groups that span tasks wait, nothing can complete them, and a batch needs their samples.
local function is_stranded(size)
  return not a.scoped and not a.unlimited and count("grouping") > 0 and count("ready_credit") < size and is_final()
end

-- The smallest batch size that a worker has asked for.
local function smallest_asked()
  return is_counted("asked") and count("asked") or a.batch_size
end

-- True if the trainer has, or can get, a batch: consuming it frees memory. Otherwise refusing samples could block the
-- next batch forever.
local function can_leave()
  return not a.unlimited and (count("batched") > 0 or batch_credit(smallest_asked()) > 0)
end

local function no_room(field, bytes)
  if count("payload_bytes") + bytes > a.max_payload_bytes then
    return full(field .. ": " .. bytes .. " bytes; " .. count("payload_bytes") .. " are held and at most " ..
      string.format("%d", a.max_payload_bytes) .. " may be, by trajectoryPool.maxPayloadBytes or two thirds of Redis' " ..
      "maxmemory; try again when the trainer has trained more batches")
  end
end

local function is_exhausted()
  return not data_left() and is_idle()
end

-- True if no further batch can be formed.
local function is_used_up()
  return is_exhausted() and count("ready") == 0 and (count("grouping") == 0 or a.unlimited)
end

local function refund(samples)
  if samples == 0 then return end
  add("refunded", samples)
  wake("tasks")
end

-- Wakes those who wait, and only if they would find something: each wake-up costs every waiter a call.
local function wake_for_progress()
  local size = smallest_asked()
  if batch_credit(size) > 0 or is_stranded(size) then wake("batch") end
  if is_exhausted() then
    wake("tasks")
    wake("batch")
    wake("train")
  end
end
