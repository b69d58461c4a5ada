-- Large results: counted for their projects while they are kept, and moved to the object store.

-- part: count_result
-- needs: settings
-- Count a result that was just stored, if it is large, and list it for its move. Smaller ones only cost their memory.
local function count_result(request, size)
  if size < SETTINGS.result_spill then return end
  local owner = redis.call('HGET', 'tinsmith:future:' .. request, 'owner')
  redis.call('HSET', 'tinsmith:results', request, cjson.encode({size = size, owner = owner, key = ''}))
  redis.call('HINCRBY', 'tinsmith:result_bytes', owner, size)
  redis.call('SADD', 'tinsmith:results_due', request)
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
if not listed or redis.call('HEXISTS', future, 'body') == 0 then
  redis.call('SADD', 'tinsmith:spill_garbage', ARGV[2])
  return 0
end
local result = cjson.decode(listed)
result.key = ARGV[2]
redis.call('HSET', 'tinsmith:results', ARGV[1], cjson.encode(result))
redis.call('HSET', future, 'spilled', ARGV[2], 'size', result.size)
redis.call('HDEL', future, 'body')
return 1

-- script: forget_results flags=allow-oom
-- Stop counting results that have expired, and give up their objects. ARGV: cursor, rows to look at. Returns the next
-- cursor.
local found = redis.call('HSCAN', 'tinsmith:results', ARGV[1], 'COUNT', ARGV[2])
for i = 1, #found[2], 2 do
  local request = found[2][i]
  if redis.call('EXISTS', 'tinsmith:future:' .. request) == 0 and redis.call('HDEL', 'tinsmith:results', request) == 1 then
    local result = cjson.decode(found[2][i + 1])
    local left = redis.call('HINCRBY', 'tinsmith:result_bytes', result.owner, -result.size)
    if left == 0 then redis.call('HDEL', 'tinsmith:result_bytes', result.owner) end
    redis.call('SREM', 'tinsmith:results_due', request)
    if result.key ~= '' then redis.call('SADD', 'tinsmith:spill_garbage', result.key) end
  end
end
return found[1]
