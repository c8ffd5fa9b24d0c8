-- Train batches: what a step trains on, kept until a checkpoint contains the step.


-- Acknowledges a batch and stores its train batch in one move: there is no instant at which neither holds the samples.
function moves.put_train_batch()
  local state, is_owner = owned_batch(a.batch, a.attempt)
  if (state ~= "leased" and state ~= "acked") or not is_owner then return lease_lost(a.batch) end
  local refused = other_samples(a.batch)
  if refused then return refused end
  if state == "acked" then return {} end
  if a.pieces > 1 and redis.call("HLEN", prefix .. a.staged) ~= a.pieces - 1 then
    return fail("UNAVAILABLE", "batch " .. a.batch .. ": Redis has lost pieces of its train batch; send it again")
  end
  local name = string.format("%d", a.batch)
  local b, train = K.batch .. name, K.train_batch .. name
  if a.pieces > 1 then
    write("RENAME", prefix .. a.staged, train)
    write("PERSIST", train)
  else
    write("DEL", train)
  end
  write("HSET", train, a.pieces - 1, ARGV[5])
  add("payload_bytes", a.bytes)
  set(K.train_batches, name, "queued")
  set_score(K.batch_leases, name, nil)
  set(b, "state", "acked")
  set(b, "train_bytes", a.bytes)
  set(b, "put_id", a.put_id)
  local by_task = {}
  for id in get(b, "ids"):gmatch("%S+") do
    local task = split_id(id)
    by_task[task] = (by_task[task] or 0) + 1
  end
  for task, samples in pairs(by_task) do settle(task, samples) end
  wake("train")
  return {}
end

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
  -- A trainer acknowledges a step before it leases the next. An unknown step means that Redis lost writes.
  if a.step > count("trained_steps") then
    return fail("ABORTED", "step " .. a.step .. ": only " .. count("trained_steps") .. " steps are acknowledged; resume from a checkpoint")
  end
  if redis.call("HEXISTS", K.train_batches, a.step) == 1 then
    return { pieces = redis.call("HLEN", K.train_batch .. a.step), exhausted = false }
  end
  return { pieces = 0, exhausted = a.step >= count("next_batch") and is_used_up() }
end

-- Returns why the trainer's train batch is not the one that the ledger wants trained next.
local function contradicted()
  if not redis.call("HGET", K.train_batches, a.step) then
    return fail("ABORTED", "step " .. a.step .. ": no such train batch")
  end
  if a.step ~= count("trained_steps") then
    return fail("ABORTED", "step " .. a.step .. ": step " .. count("trained_steps") .. " comes next")
  end
  local other = other_samples(a.step)
  if other then return other end
  -- The same samples may have been produced twice, and made into a train batch twice, if Redis forgot the first.
  if get(K.batch .. a.step, "put_id") ~= a.put_id then
    return fail("ABORTED", "step " .. a.step .. ": put_id is not that of the ledger's train batch; resume from a checkpoint")
  end
end

function moves.ack_train_batch()
  local refused = fenced()
  if refused then return refused end
  local state = redis.call("HGET", K.train_batches, a.step)
  if state == "trained" or a.step < count("durable_steps") then return {} end
  refused = contradicted()
  if refused then return refused end
  local samples = tonumber(get(K.batch .. a.step, "n"))
  set(K.train_batches, a.step, "trained")
  unset(K.batch .. a.step, "failures") -- it can be trained: a replay counts from 0 again
  add("batched", -samples)
  add("trained", samples)
  add("trained_steps", 1)
  set_counter("most_trained_steps", math.max(count("most_trained_steps"), count("trained_steps")))
  add("kept", 1)
  wake("batch")
  -- Trained batches are kept until a checkpoint has them: only that makes room.
  return { checkpoint_wanted = 2 * count("payload_bytes") > a.max_payload_bytes }
end

-- Drops the samples of a train batch, and stores one without them in its place: step b still takes batch b, and trains
-- nothing. Its number of samples becomes 0, so that no later move counts them as trained.
local function drop_train_batch()
  local step = string.format("%d", a.step)
  local b = K.batch .. step
  local samples = tonumber(get(b, "n"))
  add("batched", -samples)
  add_dropped(TRAINING_FAILED, samples)
  add("payload_bytes", #ARGV[5] - tonumber(get(b, "train_bytes")))
  set(K.dropped_batches, step, TRAINING_FAILED)
  set(b, "n", 0)
  set(b, "train_bytes", #ARGV[5])
  set(b, "put_id", a.new_put_id)
  delete(K.train_batch .. step)
  set(K.train_batch .. step, "0", ARGV[5])
end

-- Counts a failure of the training of a train batch; drops it when it has failed MAX_TRAININGS times. Changes nothing if
-- it would drop the train batch and the call brings none in its place: to make one, a caller must read the whole batch.
function moves.fail_train_batch()
  local refused = fenced() or contradicted()
  if refused then return refused end
  local failures = tonumber(get(K.batch .. a.step, "failures") or 0) + 1
  local is_dropped = failures >= MAX_TRAININGS
  if is_dropped and ARGV[5] == "" then return { empty = true } end
  set(K.batch .. a.step, "failures", failures)
  if is_dropped then drop_train_batch() end
  return { dropped = is_dropped }
end

function moves.commit_checkpoint()
  local refused = fenced()
  if refused then return refused end
  if a.steps > count("trained_steps") then
    return fail("FAILED_PRECONDITION", "steps " .. a.steps .. ": only " .. count("trained_steps") .. " were acknowledged")
  end
  for step = count("durable_steps"), a.steps - 1 do
    local b = K.batch .. step
    add("durable", tonumber(get(b, "n")))
    add("kept", -1)
    add("payload_bytes", -tonumber(get(b, "train_bytes")))
    unset(K.train_batches, step)
    delete(K.train_batch .. step)
    delete(b)
  end
  if a.steps > count("durable_steps") then set_counter("durable_steps", a.steps) end
  return {}
end

-- Deletes all that was granted. Workers that did not notice that Redis lost everything lease from it anew, from the start
-- of the data. Their samples may even be in batches before the trainer is back and says where its checkpoint goes on.
local function forget_granted()
  local groups = redis.call("SMEMBERS", K.groups)
  for _, task in ipairs(task_ids(0, count("next_task") - 1)) do
    for _, name in ipairs(cjson.decode(get(K.task .. task, "groups") or "[]")) do groups[#groups + 1] = name end
    for _, name in ipairs({ K.task .. task, K.payloads .. task, history(task) }) do delete(name) end
  end
  for _, name in ipairs(groups) do delete(K.group .. name) end
  for batch = 0, count("next_batch") - 1 do
    for _, family in ipairs({ K.batch, K.train_batch }) do delete(family .. batch) end
  end
  local names = { META, K.batch_sizes, K.dropped_batches, K.lives, K.open, K.added, K.leases, K.groups, K.ready, K.formed,
                  K.batch_leases, K.train_batches, K.last_failure }
  for _, name in ipairs(names) do delete(name) end
end

-- The first trainer says where this ledger begins, even if workers have leased before it came.
local function begin_at(steps, cursor)
  for _, field in ipairs({ "start_steps", "next_batch", "trained_steps", "durable_steps", "version" }) do
    set_counter(field, steps)
  end
  set_counter("cursor", math.max(cursor, count("cursor")))
  -- A checkpoint without its ledger: what was granted by the ledger that is gone must not be taken for a grant of this one.
  if steps > 0 then set(K.lives, "life", "gone") end
  if not get(K.lives, "life") then set(K.lives, "life", this_life()) end
  wake("tasks")
end

-- Queues the steps again that were trained and are in no checkpoint; returns how many.
local function replay_from(steps)
  local replayed = 0
  for step = steps, count("trained_steps") - 1 do
    local samples = tonumber(get(K.batch .. step, "n"))
    set(K.train_batches, step, "queued")
    add("trained", -samples)
    add("batched", samples)
    add("kept", -1)
    replayed = replayed + 1
  end
  set_counter("trained_steps", steps)
  return replayed
end

function moves.resume()
  if count("incarnation") == 0 and a.steps > 0 then forget_granted() end
  if count("incarnation") == 0 and count("next_batch") == 0 then begin_at(a.steps, a.cursor) end
  if a.steps < count("durable_steps") or a.steps > count("trained_steps") then
    return fail("FAILED_PRECONDITION", "steps " .. a.steps .. ": the ledger can resume from " .. count("durable_steps") ..
      " to " .. count("trained_steps") .. "; load such a checkpoint, or start under another name")
  end
  local replayed = replay_from(a.steps)
  -- The algorithm processor ends with its trainer: its batches are offered again at once.
  for _, batch in ipairs(members(K.batch_leases)) do offer_batch_again(batch) end
  wake("batch")
  wake("train")
  set_counter("incarnation", math.max(count("incarnation") + 1, count("next_incarnation")))
  return { incarnation = count("incarnation"), replayed = replayed }
end
