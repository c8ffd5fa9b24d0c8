-- Batches: ready groups that one step trains on.

local function drop_stale(entry)
  each_sample(entry.groups, function(_, task, k) drop(task, k, "ready", "stale") end)
  add("ready_credit", -entry.credit)
  refund(entry.credit)
end

-- Batch b is trained by step b, so its staleness is known here, before anything is computed on it.
local function drop_stale_groups(batch)
  filter(K.ready, function(encoded)
    local oldest = tonumber(encoded:match('"oldest":%s*(%d+)')) -- much faster than to decode them all
    if batch - oldest <= a.staleness then return true end
    drop_stale(cjson.decode(encoded))
    return false
  end)
end

local function precedes(one, other)
  local one_task, one_k = split_id(one)
  local other_task, other_k = split_id(other)
  if one_task ~= other_task then return number_of(one_task) < number_of(other_task) end
  return tonumber(one_k) < tonumber(other_k)
end

-- Sorts a batch by what was granted, so that it does not depend on the order of arrival; returns the ids in that order.
local function in_order(groups)
  for _, group in ipairs(groups) do table.sort(group.samples, precedes) end
  table.sort(groups, function(one, other) return precedes(one.samples[1], other.samples[1]) end)
  local ids = {}
  each_sample(groups, function(id) ids[#ids + 1] = id end)
  return ids
end

-- Puts a sample into a batch. A sample enters one batch, once: anything else would be trained twice.
local function take(id, batch)
  local task, k = split_id(id)
  local r = row(task, k)
  assert(r and r.state == "produced", "sample " .. id .. " enters batch " .. batch .. " as " .. (r and r.state or "unknown"))
  r.state = "b" .. batch
  set_row(task, k, r)
  use(task)
end

local function bytes_of(entry)
  local bytes = 0
  each_sample(entry.groups, function(_, task, k) bytes = bytes + redis.call("HSTRLEN", K.payloads .. task, k) end)
  return bytes
end

-- Takes ready entries of at least `wanted` samples of credit; returns their groups, that credit, and their bytes.
local function take_ready(wanted)
  local groups, entries, taken, bytes = {}, 0, 0, 0
  while taken < wanted do
    local entry = cjson.decode(value_at(K.ready, entries + 1))
    local more = bytes_of(entry)
    if entries > 0 and bytes + more > a.max_batch_bytes then break end
    entries, taken, bytes = entries + 1, taken + entry.credit, bytes + more
    for _, group in ipairs(entry.groups) do groups[#groups + 1] = group end
  end
  drop_front(K.ready, entries)
  return groups, taken, bytes
end

local function form_batch(size)
  local batch = count("next_batch")
  if batch >= a.total_steps then return nil end
  drop_stale_groups(batch)
  if is_stranded(size) then close_stranded() end
  local wanted = batch_credit(size)
  if wanted == 0 then return nil end
  local groups, taken, bytes = take_ready(wanted)
  local ids = in_order(groups)
  for _, id in ipairs(ids) do take(id, batch) end
  if taken > size then wake("tasks") end -- the batch used more than its share, so there is more to grant
  add("ready", -#ids)
  add("ready_credit", -taken)
  add("taken", taken)
  add("batched", #ids)
  add("next_batch", 1)
  local name = string.format("%d", batch)
  local fields = {
    groups = cjson.encode(groups), ids = table.concat(ids, " "), n = #ids, state = "formed", attempt = 0,
    cursor = math.max(0, count("cursor") - count("unused")), sample_bytes = bytes, refilled = count("refilled"),
  }
  for field, value in pairs(fields) do set(K.batch .. name, field, value) end
  set_counter("refilled", 0)
  set(K.batch_sizes, name, #ids)
  set_score(K.formed, name, batch)
  return name
end

local function no_batch()
  local is_last = is_used_up() and #members(K.batch_leases) == 0
  if is_last then wake("train") end
  return { empty = true, exhausted = is_last }
end

-- Returns the batch that is leased to this worker. A worker that asks for a batch has none: it was started again, or
-- Redis lost the write that had acknowledged the batch.
local function leased_to(worker)
  if worker == "" then return nil end
  for _, batch in ipairs(members(K.batch_leases)) do
    if get(K.batch .. batch, "worker") == worker then return batch end
  end
end

local function queued_train_batches() return redis.call("HLEN", K.train_batches) - count("kept") end

local function lease(batch)
  local b = K.batch .. batch
  set_score(K.formed, batch, nil)
  set_score(K.batch_leases, batch, now + a.lease_seconds)
  set(b, "state", "leased")
  set(b, "worker", a.worker)
  return { batch = tonumber(batch), attempt = increase(b, "attempt", 1), groups = cjson.decode(get(b, "groups")),
           cursor = tonumber(get(b, "cursor")), bytes = tonumber(get(b, "sample_bytes")),
           refilled = tonumber(get(b, "refilled") or 0) }
end

function moves.lease_batch()
  expire()
  local size = a.size or a.batch_size
  if size < smallest_asked() then set_counter("asked", size) end
  local first = leased_to(a.worker) or members(K.formed)[1]
  if not first then
    if #members(K.batch_leases) + queued_train_batches() >= a.max_queued then
      return { empty = true, exhausted = false }
    end
    first = form_batch(size)
  end
  if not first then return no_batch() end
  return lease(first)
end

local function owned_batch(batch, attempt)
  local b = K.batch .. batch
  return get(b, "state"), tonumber(get(b, "attempt") or -1) == attempt
end

-- A Redis that lost its last writes may have formed another batch of that number since.
local function other_samples(batch)
  if get(K.batch .. batch, "ids") ~= a.ids then
    return fail("ABORTED", "batch " .. batch .. ": sample_ids are not those of the ledger's batch of that number; lease it again")
  end
end

local function lease_lost(batch) return fail("ABORTED", "batch " .. batch .. ": the lease was lost") end

function moves.return_batch()
  local state, is_owner = owned_batch(a.batch, a.attempt)
  if state ~= "leased" or not is_owner then return lease_lost(a.batch) end
  offer_batch_again(string.format("%d", a.batch))
  wake("batch")
  return {}
end
