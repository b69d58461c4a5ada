-- Payloads of requests: their bytes, the room for them, and their move to the object store.

-- part: count_payload
-- needs: settings
-- Count a payload that was just stored. A payload worth a separate object is listed for spilling, the large ones first.
local function count_payload(request, size, now)
  redis.call('INCRBY', 'tinsmith:payload_bytes', size)
  if size >= SETTINGS.spill_least then
    redis.call('ZADD', 'tinsmith:spillable', size > SETTINGS.spill_at_once and 0 or now, request)
  end
end

-- part: content
-- needs: count_payload
-- The content of a call: small bytes are an argument of the script, large ones lie in pieces of a key (Staging in
-- payloads.py), which has `size` bytes once all are there.
local function content_of(bytes, staged, size)
  local function is_absent() return staged ~= '' and redis.call('STRLEN', staged) ~= size end

  local function store(request, now)
    local payload = 'tinsmith:payload:' .. request
    if staged == '' then
      redis.call('SET', payload, bytes)
    else
      redis.call('RENAME', staged, payload)
      redis.call('PERSIST', payload)
    end
    count_payload(request, size, now)
  end

  -- The answer of the script, which leaves no key behind.
  local function answered(answer)
    if staged ~= '' then redis.call('DEL', staged) end
    return answer
  end

  return {is_absent = is_absent, store = store, answered = answered, size = size}
end

-- part: brought
-- The content of a request, for the script that starts it to bring along: its bytes, or '' for a request without any.
-- Returns nil for a content over `most` bytes, or one in the object store: whoever asks reads it first.
local function brought(request, op, most)
  local payload = 'tinsmith:payload:' .. request
  if redis.call('STRLEN', payload) > tonumber(most) or redis.call('HEXISTS', op, 'spilled') == 1 then return nil end
  return redis.call('GET', payload) or ''
end

-- part: drop_payload
-- Drop the payload of a request that is never run or replayed again. Call it before op:<request> is deleted: that hash
-- has the key of a spilled payload.
local function drop_payload(request)
  local key = 'tinsmith:payload:' .. request
  local size = redis.call('STRLEN', key)
  if size > 0 then
    redis.call('DECRBY', 'tinsmith:payload_bytes', size)
    redis.call('DEL', key)
    redis.call('ZREM', 'tinsmith:spillable', request)
  end
  local spilled = redis.call('HGET', 'tinsmith:op:' .. request, 'spilled')
  if spilled then
    redis.call('HDEL', 'tinsmith:op:' .. request, 'spilled')
    redis.call('SADD', 'tinsmith:spill_garbage', spilled)
  end
end

-- part: no_room
-- needs: settings
-- Reads a number from INFO's text; the plain search is many times faster than a single pattern.
local function number(info, name)
  local _, last = info:find('\n' .. name .. ':', 1, true)
  return tonumber(info:match('^%d+', last + 1))
end

-- The error that refuses a payload of `size` bytes, or a record (size 0); nil while there is room.
local function no_room(size)
  local shortage = redis.call('GET', 'tinsmith:shortage')
  if shortage then return redis.error_reply('FULL ' .. shortage) end
  local held = tonumber(redis.call('GET', 'tinsmith:payload_bytes') or 0)
  if size > 0 and held + size > SETTINGS.payload_budget then
    return redis.error_reply('FULL the server holds ' .. held .. ' bytes of calls that have not run or may have to run '
                             .. 'again; with this one they would be over engine.payload_budget_bytes')
  end
  local memory = redis.call('INFO', 'memory')
  local most = number(memory, 'maxmemory')
  if most > 0 and number(memory, 'used_memory') >= most * SETTINGS.memory_share then
    return redis.error_reply('FULL the state server has used engine.memory_share of its maxmemory')
  end
end

-- script: begin_spill flags=allow-oom
-- needs: now_ms
-- Note the key of an object before a payload is written to it. ARGV: the key. Returns 1, or 0 when it was noted before.
return redis.call('ZADD', 'tinsmith:spilling', now_ms(), ARGV[1])

-- script: due_to_spill
-- needs: settings
-- List the payloads that should move to the object store: the large ones, and the oldest while over half the budget is
-- used. ARGV: most rows. Returns request ids in the order in which they should move.
local held = tonumber(redis.call('GET', 'tinsmith:payload_bytes') or 0)
local due = {}
local listed = redis.call('ZRANGE', 'tinsmith:spillable', 0, ARGV[1] - 1, 'WITHSCORES')
for i = 1, #listed, 2 do
  if listed[i + 1] ~= '0' and held <= SETTINGS.payload_budget / 2 then break end
  due[#due + 1] = listed[i]
  held = held - redis.call('STRLEN', 'tinsmith:payload:' .. listed[i])
end
return due

-- script: spill flags=allow-oom
-- needs: drop_payload
-- Replace a payload by the object that holds it. ARGV: request id, object key, when the Op was admitted.
-- Returns 1; 0 when the object was given up meanwhile, or became garbage because the payload is gone.
if redis.call('ZREM', 'tinsmith:spilling', ARGV[2]) == 0 then return 0 end
local op = 'tinsmith:op:' .. ARGV[1]
local is_there = redis.call('EXISTS', 'tinsmith:payload:' .. ARGV[1]) == 1
if not is_there or redis.call('HGET', op, 'admitted') ~= ARGV[3] then
  redis.call('SADD', 'tinsmith:spill_garbage', ARGV[2])
  return 0
end
drop_payload(ARGV[1])
redis.call('HSET', op, 'spilled', ARGV[2])
return 1

-- script: spill_garbage flags=allow-oom
-- needs: now_ms
-- List the objects that nobody needs, also those of tries that never ended. ARGV: ms after which a try counts as dead,
-- most rows. Returns their keys.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', 'tinsmith:spilling', '-inf', now_ms() - ARGV[1])) do
  redis.call('ZREM', 'tinsmith:spilling', key)
  redis.call('SADD', 'tinsmith:spill_garbage', key)
end
return redis.call('SRANDMEMBER', 'tinsmith:spill_garbage', ARGV[2])

-- script: take_none flags=allow-oom
-- Have new calls refused. ARGV: the reason, ms. Returns 1.
redis.call('SET', 'tinsmith:shortage', ARGV[1], 'PX', ARGV[2])
return 1

-- script: room flags=allow-oom
-- needs: no_room
-- Returns the reason why no call is admitted now, or ''.
local refusal = no_room(1)
return refusal and refusal.err or ''
