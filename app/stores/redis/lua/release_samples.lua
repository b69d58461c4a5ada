#!lua flags=allow-oom
-- Dispatch as many throttled requests of a queue as there is room for, in rounds of one request per project.
-- ARGV: queue, projects that come after the others, in this order. Returns {request id, node or ''} of each.
local queue, rank, due = ARGV[1], {}, {}
for i = 2, #ARGV do rank[ARGV[i]] = i end
local projects = redis.call('SMEMBERS', 'tinsmith:holding:' .. queue)
table.sort(projects, function(a, b)
  local first, second = rank[a] or 0, rank[b] or 0
  return first < second or (first == second and a < b)
end)

-- Dispatch the oldest request of a project, if there is room for it. Returns true if there was room.
local function release(project)
  local request = redis.call('ZRANGE', held_key(queue, project), 0, 0)[1]
  if not request then return false end
  local rows = tonumber(redis.call('HGET', 'tinsmith:op:' .. request, 'rows'))
  if not may_ring(queue, project, rows) then return false end
  unhold(request, queue, project)
  due[#due + 1] = {request, ring(request, queue, project)}
  redis.call('ZADD', 'tinsmith:pending', now_ms(), request)
  return true
end

local went_on = true
while went_on do
  went_on = false
  for _, project in ipairs(projects) do went_on = release(project) or went_on end
end
return due
