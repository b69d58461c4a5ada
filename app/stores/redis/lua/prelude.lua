-- Put before every script, behind `LIMITS` (see scripts.py).
-- So long after its last request an adapter's home is forgotten: by then its engine may well have evicted it.
local HOME_MS = 3600000

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A model with nothing applied; its fields are ARGV from `first` on: field, value, ...
local function register_model(model, first)
  redis.call('HSET', 'tinsmith:models:' .. model, 'applied', -1, 'epoch', 0, 'worker', '', 'snapshot', '',
             'snapshot_seq', -1, unpack(ARGV, first))
  redis.call('ZADD', 'tinsmith:index:models', 0, model)
end

-- The queue its trainers read; doorbell.train_queue says the same.
local function train_queue(model)
  local found = redis.call('HMGET', 'tinsmith:models:' .. model, 'base_model', 'full')
  return (found[2] == 'true' and 'full.' or 'train.') .. cjson.decode(found[1])
end

-- What already waits behind a lost gradient, up to and including the next optim_step, fails with `reason`.
local function doom(model, seq, reason)
  for _, later in ipairs(redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, '+inf')) do
    local op = 'tinsmith:op:' .. model .. ':' .. later
    redis.call('HSETNX', op, 'doomed', reason)
    if redis.call('HGET', op, 'kind') == 'optim_step' then break end
  end
end

-- The prefixes of a model's adapters that are not in the object store yet. '0' is what follows '/'.
local function handed_over(model)
  local prefix = 'models/' .. model
  return redis.call('ZRANGEBYLEX', 'tinsmith:index:handovers', '[' .. prefix .. '/', '(' .. prefix .. '0')
end

-- The object-store prefix of the adapter that a sampler's next request is to have; '' for the base.
local function adapter_of(sampler)
  local found = redis.call('HMGET', 'tinsmith:samplers:' .. sampler, 'prefix', 'follows')
  local follows = cjson.decode(found[2] or '""')
  local newest = follows ~= '' and redis.call('HGET', 'tinsmith:models:' .. follows, 'inflight')
  return cjson.decode(newest or found[1] or '""')
end

-- Whether a session (its id as JSON) ended `least` ms ago or earlier, and nobody brought it back since.
local function is_retired(session, least)
  local ended = redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))
  return ended and now_ms() - ended >= tonumber(least)
end

-- An Op of a session (its id as JSON, or false) shows that it lives: it is open again, unless its client finished it.
local function hear(session, now)
  if not session then return end
  local id = cjson.decode(session)
  redis.call('ZADD', 'tinsmith:sessions_heard', now, id)
  redis.call('ZREM', 'tinsmith:sessions_ended', id)
  local key = 'tinsmith:sessions:' .. id
  if redis.call('HGET', key, 'status') == '"expired"' then redis.call('HSET', key, 'status', '"open"') end
end

-- Count a payload that was just stored; one worth an object of its own is listed for spilling, the large ones first.
local function count_payload(request, size, now)
  redis.call('INCRBY', 'tinsmith:payload_bytes', size)
  if size >= LIMITS.spill_least then
    redis.call('ZADD', 'tinsmith:spillable', size > LIMITS.spill_at_once and 0 or now, request)
  end
end

-- Drop what nobody will run or replay again: before its op:<request> goes, since that says where a spilled one lies.
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

-- A number of INFO's text; the plain search is many times faster than one pattern would be.
local function number(info, name)
  local _, last = info:find('\n' .. name .. ':', 1, true)
  return tonumber(info:match('^%d+', last + 1))
end

-- The error that refuses a payload of `size` bytes, or a record of none; nil while there is room.
local function no_room(size)
  local held = tonumber(redis.call('GET', 'tinsmith:payload_bytes') or 0)
  if size > 0 and held + size > LIMITS.payload_budget then
    return redis.error_reply('FULL the server holds ' .. held .. ' bytes of calls that have not run or may have to run '
                             .. 'again; with this one they would be over engine.payload_budget_bytes')
  end
  local memory = redis.call('INFO', 'memory')
  local most = number(memory, 'maxmemory')
  if most > 0 and number(memory, 'used_memory') >= most * LIMITS.memory_share then
    return redis.error_reply('FULL the state server has used engine.memory_share of its maxmemory')
  end
end

-- Where it is remembered which node samples with an adapter; of requests for the base, with one sampler.
local function home_of(request, adapter)
  return 'tinsmith:home:' .. (adapter and adapter ~= '' and adapter or request:match('^(.*):%d+$'))
end

-- Have a sampling request's sequences count at one node; at none with ''. Returns the node where they counted before.
local function place(request, queue, node)
  local op, placed = 'tinsmith:op:' .. request, 'tinsmith:placed:' .. queue
  local found = redis.call('HMGET', op, 'node', 'rows')
  local before, rows = found[1] or '', found[2] or 1
  if before == node then return before end
  if before ~= '' and redis.call('HINCRBY', placed, before, -rows) == 0 then redis.call('HDEL', placed, before) end
  if node ~= '' then redis.call('HINCRBY', placed, node, rows) end
  redis.call('HSET', op, 'node', node)
  return before
end

-- What a sampling request counted for in its queue, at its node and for its sampler: before its op:<request> goes.
local function leave_queue(request, sampler)
  local queue = redis.call('HGET', 'tinsmith:pending_queue', request)
  local tokens = queue and redis.call('HGET', 'tinsmith:sampling:' .. queue, request)
  if tokens then
    place(request, queue, '')
    redis.call('HDEL', 'tinsmith:sampling:' .. queue, request)
    redis.call('HINCRBY', 'tinsmith:sampling_tokens', queue, -tokens)
  end
  redis.call('SREM', 'tinsmith:sampled:' .. sampler, request)
  if redis.call('EXISTS', 'tinsmith:sampled:' .. sampler) == 0 then
    redis.call('SREM', 'tinsmith:samplers_asked', sampler)
  end
  redis.call('ZREM', 'tinsmith:pending', request)
  redis.call('HDEL', 'tinsmith:pending_queue', request)
end

-- Note that a request of a sampler came to its end, for whoever asks about all of one clone's; ids.target_of says the same.
local function note_completion(sampler, seq, request, keep_s)
  local key = 'tinsmith:completed:' .. sampler .. '/' .. (#seq > 9 and seq:sub(1, -10) or '0')
  redis.call('ZADD', key, redis.call('INCR', 'tinsmith:completions'), request)
  redis.call('EXPIRE', key, keep_s)
end

-- Make a sampling request's result readable and let go of all else that is kept of it; the first result stays.
-- Returns whether this was the first.
local function close_sample(request, state, type, body, keep_s)
  local future = 'tinsmith:future:' .. request
  if redis.call('HGET', future, 'state') ~= 'pending' then return false end
  redis.call('HSET', future, 'state', state, 'type', type, 'body', body, 'ended', now_ms())
  redis.call('EXPIRE', future, keep_s)
  local sampler, seq = request:match('^(.*):(%d+)$')
  note_completion(sampler, seq, request, keep_s)
  drop_payload(request)
  leave_queue(request, sampler)
  redis.call('DEL', 'tinsmith:op:' .. request, 'tinsmith:lease:' .. request)
  redis.call('PUBLISH', 'tinsmith:done', request)
  return true
end

-- Close a sampling request that nobody waits for, and tell the worker that may be running it. Returns as close_sample.
local function abort_sample(request, keep_s, type, body)
  local closed = close_sample(request, 'failed', type, body, keep_s)
  if closed then redis.call('PUBLISH', 'tinsmith:aborted', request) end
  return closed
end
