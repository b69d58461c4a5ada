-- Large results: counted for their projects while they are kept, and moved to the object store.

-- part: forget_result
-- Stop counting a request's result, if it was counted, and give up its object.
local function forget_result(request)
  redis.call('ZREM', 'tinsmith:results_expire', request)
  local found = redis.call('HGET', 'tinsmith:results', request)
  if not found then return end
  local result = cjson.decode(found)
  redis.call('HDEL', 'tinsmith:results', request)
  local left = redis.call('HINCRBY', 'tinsmith:result_bytes', result.owner, -result.size)
  if left == 0 then redis.call('HDEL', 'tinsmith:result_bytes', result.owner) end
  redis.call('SREM', 'tinsmith:results_due', request)
  if result.key ~= '' then redis.call('SADD', 'tinsmith:spill_garbage', result.key) end
end

-- part: list_expiry
-- Note when a request's counted result expires. A future that was admitted again has no expiry yet, so it is taken off
-- the list.
local function list_expiry(request)
  local at = redis.call('PEXPIRETIME', 'tinsmith:future:' .. request)
  if at >= 0 then
    redis.call('ZADD', 'tinsmith:results_expire', at, request)
  elseif at == -1 then
    redis.call('ZREM', 'tinsmith:results_expire', request)
  end
end

-- part: count_result
-- needs: forget_result, list_expiry, settings
-- Count a result that was just stored, if it is large, and list it for its move; its future must expire already. Smaller
-- ones only cost their memory. A sampling request can be admitted again after its first result expired: that result
-- counts no longer then.
local function count_result(request, size)
  forget_result(request)
  if size < SETTINGS.result_spill then return end
  local owner = redis.call('HGET', 'tinsmith:future:' .. request, 'owner')
  redis.call('HSET', 'tinsmith:results', request, cjson.encode({size = size, owner = owner, key = ''}))
  redis.call('HINCRBY', 'tinsmith:result_bytes', owner, size)
  redis.call('SADD', 'tinsmith:results_due', request)
  list_expiry(request)
end

-- part: result
-- needs: count_result, now_ms
-- A result: its body, or '' with the key that holds a large one, and the size (Staging in payloads.py). Returns nil if
-- that key took so long to write that its first bytes have lapsed.
local function result_of(state, type, body, staged, size)
  if staged ~= '' and redis.call('STRLEN', staged) ~= tonumber(size) then return nil end
  return {state = state, type = type, body = body, staged = staged, size = tonumber(size)}
end

-- The error for such a result; the worker delivers it again.
local function lapsed() return redis.error_reply('FULL the result took so long to write that it has lapsed') end

-- Store a result until its time has passed: a small body in the future, a large one in a key that expires with the future.
local function store_result(request, result, keep_s)
  local future = 'tinsmith:future:' .. request
  redis.call('HSET', future, 'state', result.state, 'type', result.type, 'ended', now_ms())
  redis.call('EXPIRE', future, keep_s)
  if result.staged == '' then
    redis.call('HSET', future, 'body', result.body)
  else
    local key = 'tinsmith:result:' .. request
    redis.call('RENAME', result.staged, key)
    redis.call('EXPIRE', key, keep_s)
    redis.call('HSET', future, 'size', result.size)
  end
  count_result(request, result.size)
end

-- part: no_room_for_results
-- needs: settings
-- The error that refuses a project's call; nil while its large results are within the budget.
local function no_room_for_results(owner)
  local held = tonumber(redis.call('HGET', 'tinsmith:result_bytes', owner) or 0)
  if held > SETTINGS.result_budget then
    return redis.error_reply('FULL the results of this project take ' .. held .. ' bytes, over '
                             .. 'engine.result_budget_bytes; results expire, and sooner once they were read')
  end
end

-- script: due_results
-- List large results that should move to the object store. ARGV: most rows. Returns request ids.
return redis.call('SRANDMEMBER', 'tinsmith:results_due', ARGV[1])

-- script: spill_result flags=allow-oom
-- Replace the body of a result by the object that holds it. ARGV: request id, object key. Returns 1; 0 when the object
-- was given up meanwhile, or became garbage because the result is gone or has moved before.
redis.call('SREM', 'tinsmith:results_due', ARGV[1])
if redis.call('ZREM', 'tinsmith:spilling', ARGV[2]) == 0 then return 0 end
local future, listed = 'tinsmith:future:' .. ARGV[1], redis.call('HGET', 'tinsmith:results', ARGV[1])
if not listed or redis.call('EXISTS', future) == 0
   or redis.call('HEXISTS', future, 'body') + redis.call('EXISTS', 'tinsmith:result:' .. ARGV[1]) == 0 then
  redis.call('SADD', 'tinsmith:spill_garbage', ARGV[2])
  return 0
end
local result = cjson.decode(listed)
result.key = ARGV[2]
redis.call('HSET', 'tinsmith:results', ARGV[1], cjson.encode(result))
redis.call('HSET', future, 'spilled', ARGV[2], 'size', result.size)
redis.call('HDEL', future, 'body')
redis.call('DEL', 'tinsmith:result:' .. ARGV[1])
return 1

-- script: note_read flags=allow-oom
-- needs: list_expiry
-- Let results expire sooner, since they were read. Unfinished and unknown requests do not change. ARGV: seconds to keep
-- the results at most, request ids. Returns 0.
for i = 2, #ARGV do
  -- XX: the future of an unfinished request has no expiry yet, and must not get one.
  redis.call('EXPIRE', 'tinsmith:future:' .. ARGV[i], ARGV[1], 'XX', 'LT')
  redis.call('EXPIRE', 'tinsmith:result:' .. ARGV[i], ARGV[1], 'LT')
  if redis.call('HEXISTS', 'tinsmith:results', ARGV[i]) == 1 then list_expiry(ARGV[i]) end
end
return 0

-- script: forget_expired flags=allow-oom
-- needs: forget_result, list_expiry, now_ms
-- Stop counting the results whose time has come. ARGV: most results. Returns the number of results it looked at.
local due = redis.call('ZRANGEBYSCORE', 'tinsmith:results_expire', '-inf', now_ms(), 'LIMIT', 0, ARGV[1])
for _, request in ipairs(due) do
  if redis.call('EXISTS', 'tinsmith:future:' .. request) == 0 then
    forget_result(request)
  else
    list_expiry(request)  -- admitted again, or at its last millisecond
  end
end
return #due

-- script: forget_results flags=allow-oom
-- needs: forget_result
-- Stop counting expired results whose expiry is not listed, as earlier versions store them. List results for their move
-- again that a maintenance leader of an earlier version did not find. ARGV: cursor, rows to look at. Returns the next
-- cursor.
local found = redis.call('HSCAN', 'tinsmith:results', ARGV[1], 'COUNT', ARGV[2])
for i = 1, #found[2], 2 do
  local request = found[2][i]
  if redis.call('EXISTS', 'tinsmith:future:' .. request) == 0 then
    forget_result(request)
  elseif cjson.decode(found[2][i + 1]).key == '' then
    redis.call('SADD', 'tinsmith:results_due', request)
  end
end
return found[1]
