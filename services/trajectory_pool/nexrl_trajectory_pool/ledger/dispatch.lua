-- Dispatch: runs the move, then sends all that it wrote.

local function collect_writes()
  write_groups()
  write_sorted()
  write_lists()
  write_hashes()
end

-- The first command may be refused by a Redis that is full, read-only or without replicas; then nothing was written. Redis
-- refuses none of a script's later commands for such a reason.
local function send_writes()
  for i = 1, #deleted, 1000 do redis.call("DEL", unpack(deleted, i, math.min(i + 999, #deleted))) end
  for _, command in ipairs(writes) do redis.call(unpack(command)) end
  for topic in pairs(woken) do redis.call("PUBLISH", K.wake, topic) end
end

local request = K.request .. move .. ":" .. request_id
if request_id ~= "" then
  local first_answer = redis.call("GET", request)
  if first_answer then return first_answer end
end
local result = moves[move]()
-- A refused request changes nothing.
if result.error then return cjson.encode(result) end
local answer = cjson.encode(result)
collect_writes()
-- An empty answer may become another one: the request may be repeated under the same id.
if request_id ~= "" and not result.empty then
  write("SET", request, answer, "EX", REQUEST_SECONDS)
end
send_writes()
return answer
