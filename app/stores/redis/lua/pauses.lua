-- Pauses of the sampling requests of silent clients.

-- part: is_silent
-- Returns true if a sampler's session had no sign of life after `since`, false if it had one, and nil if it has ended.
local function is_silent(sampler, since)
  local session = redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id')
  local heard = session and redis.call('ZSCORE', 'tinsmith:sessions_heard', cjson.decode(session))
  if not heard then return nil end
  return tonumber(heard) <= since
end

-- script: pause_samples flags=allow-oom
-- needs: is_silent, leave_project, now_ms, paused, place, throttled
-- Pause the unfinished requests of silent sessions: they count for no node and no turn, and nobody may begin them. A
-- worker that runs one learns it when it renews the lease. ARGV: ms of silence, most requests. Returns the number paused.
local paused, most, since = 0, tonumber(ARGV[2]), now_ms() - ARGV[1]

local function pause(request, sampler)
  local queue, op = redis.call('HGET', 'tinsmith:pending_queue', request), 'tinsmith:op:' .. request
  place(request, queue, '')
  leave_project(request, queue)
  redis.call('HSET', op, 'ring', 'paused')
  redis.call('SADD', paused_key(sampler), request)
  local found = redis.call('HMGET', op, 'rows', 'admitted')
  redis.call('HINCRBY', paused_rows(queue), redis.call('HGET', 'tinsmith:future:' .. request, 'owner'), found[1] or 1)
  redis.call('ZADD', 'tinsmith:pending', found[2] + THROTTLED_MS, request)
end

for _, sampler in ipairs(redis.call('SMEMBERS', 'tinsmith:samplers_asked')) do
  local all, already = 'tinsmith:sampled:' .. sampler, paused_key(sampler)
  if paused < most and is_silent(sampler, since) and redis.call('SCARD', all) > redis.call('SCARD', already) then
    local due = redis.call('SDIFF', all, already)
    for i = 1, math.min(#due, most - paused) do
      pause(due[i], sampler)
      paused = paused + 1
    end
  end
end
return paused

-- script: resume_samples flags=allow-oom
-- needs: is_silent, leave_project, now_ms, paused, throttled
-- Throttle the paused requests of sessions that are silent no more, in the order of their admission; they are dispatched
-- as any throttled request. ARGV: ms of silence, most requests. Returns the number resumed.
local resumed, most, since = 0, tonumber(ARGV[2]), now_ms() - ARGV[1]

local function resume(request)
  local queue = redis.call('HGET', 'tinsmith:pending_queue', request)
  leave_project(request, queue)
  local found = redis.call('HMGET', 'tinsmith:future:' .. request, 'owner', 'admitted')
  throttle(request, queue, found[1], tonumber(found[2]))
end

for _, sampler in ipairs(redis.call('SMEMBERS', 'tinsmith:samplers_asked')) do
  if resumed < most and redis.call('EXISTS', paused_key(sampler)) == 1 and is_silent(sampler, since) == false then
    local due = redis.call('SINTER', paused_key(sampler), 'tinsmith:sampled:' .. sampler)
    for i = 1, math.min(#due, most - resumed) do
      resume(due[i])
      resumed = resumed + 1
    end
  end
end
return resumed
