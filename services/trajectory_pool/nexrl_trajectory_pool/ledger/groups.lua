-- Groups: samples that are compared with each other. They wait until their group is complete, or can never be.

local function each_sample(groups, visit)
  for _, group in ipairs(groups) do
    for _, id in ipairs(group.samples) do visit(id, split_id(id)) end
  end
end

local function drop_groups(groups, reason)
  each_sample(groups, function(_, task, k) drop(task, k, "grouping", reason) end)
end

-- True if all rewards are known and equal; also for a sample alone, which has nothing to be compared with.
local function has_equal_rewards(group)
  local first
  for _, id in ipairs(group.samples) do
    local task, k = split_id(id)
    local reward = get(K.task .. task, "r" .. k)
    first = first or reward
    if not reward or reward ~= first then return false end
  end
  return true
end

-- True if other groups take the place of these: all of them teach nothing, and the limit of the next batch allows it.
local function are_refilled(groups)
  if count("refilled") + #groups > a.max_refilled then return false end
  for _, group in ipairs(groups) do
    if not has_equal_rewards(group) then return false end
  end
  return true
end

-- Moves groups to `ready`, or drops them if they are refilled. They enter a batch together. `cost` is the credit that the
-- batch pays: the samples granted, including lost ones.
local function release(groups, cost)
  if are_refilled(groups) then
    add("refilled", #groups)
    drop_groups(groups, "equal_rewards")
    return refund(cost)
  end
  local oldest, samples = math.huge, 0
  each_sample(groups, function(_, task, k)
    oldest = math.min(oldest, tonumber(get(K.task .. task, "v" .. k)))
    samples = samples + 1
  end)
  push_back(K.ready, cjson.encode({ groups = groups, oldest = oldest, credit = cost }))
  add("grouping", -samples)
  add("ready", samples)
  add("ready_credit", cost)
end

-- Groups that this move has read. Most are completed by the put that begins them, and are then never written.
local waiting = {}

local function group_of(name)
  if not waiting[name] then
    local samples = redis.call("LRANGE", K.group .. name, 0, -1)
    waiting[name] = { samples = samples, stored = #samples }
  end
  return waiting[name]
end

local function take_group(name)
  local taken = group_of(name)
  waiting[name] = { samples = {}, stored = 0, is_taken = taken.is_taken or taken.stored > 0 }
  return { name = name, samples = taken.samples }
end

local function write_groups()
  for name, group in pairs(waiting) do
    local key, new = K.group .. name, {}
    for i = group.stored + 1, #group.samples do new[#new + 1] = group.samples[i] end
    if group.is_taken then write("DEL", key) end
    write_many("RPUSH", key, new)
    if not a.scoped then
      if #new > 0 then write("SADD", K.groups, name) elseif group.is_taken then write("SREM", K.groups, name) end
    end
  end
end

-- Releases incomplete groups smaller, or drops them, by policy.
local function close(groups, cost)
  if a.release_incomplete and #groups > 0 then return release(groups, cost) end
  drop_groups(groups, "incomplete_group")
  refund(cost)
end

-- Closes the groups of a task of which every sample has ended.
local function close_task(task)
  local t, groups = K.task .. task, {}
  for _, name in ipairs(cjson.decode(get(t, "groups") or "[]")) do
    local group = take_group(name)
    if #group.samples > 0 then groups[#groups + 1] = group end
  end
  close(groups, tonumber(get(t, "n")) - tonumber(get(t, "credited") or 0))
end

local function close_stranded()
  local names = redis.call("SMEMBERS", K.groups)
  table.sort(names)
  for _, name in ipairs(names) do
    local group = take_group(name)
    close({ group }, #group.samples)
  end
end

-- Adds a produced sample to its group.
local function join_group(task, k, result)
  local t, name = K.task .. task, result.group
  if a.max_refilled > 0 or get(t, "name") then set(t, "r" .. k, result.reward) end
  if a.scoped then
    local names = cjson.decode(get(t, "groups") or "[]")
    local is_known = false
    for _, known in ipairs(names) do is_known = is_known or known == name end
    if not is_known then
      names[#names + 1] = name
      set(t, "groups", cjson.encode(names))
    end
  end
  local samples = group_of(name).samples
  samples[#samples + 1] = result.id
  if #samples >= a.group_size then
    increase(t, "credited", a.group_size)
    release({ take_group(name) }, a.group_size)
  end
end

-- Records the mean reward of a task's samples, for the sampler. A task without rewards leaves the record as it is.
local function record_reward(t)
  local sum, rewarded = 0, 0
  for k = 0, tonumber(get(t, "n")) - 1 do
    local reward = get(t, "r" .. k)
    if reward then sum, rewarded = sum + tonumber(reward), rewarded + 1 end
  end
  if rewarded > 0 then set(K.task_rewards, get(t, "name"), string.format("%.17g", sum / rewarded)) end
end

-- Counts a sample that was produced or dropped; the last one of a task closes its groups. Its caller keeps the rows.
local function end_sample(task)
  local t = K.task .. task
  if increase(t, "ended", 1) < tonumber(get(t, "n")) then return end
  if get(t, "name") then record_reward(t) end
  if a.scoped then
    close_task(task)
  else
    refund(tonumber(get(t, "lost") or 0))
  end
  if a.unlimited then wake("ended") end
  wake_for_progress()
end
