-- The first part of every script, behind `LIMITS` (see scripts.py).
-- An adapter's affinity expires so long after its last request: by then its engine may well have evicted the adapter.
local HOME_MS = 3600000
-- Added to a throttled request's score in `pending`. It sorts behind all entries that may need a redispatch; redispatch
-- reads only a limited number of entries.
local HELD_MS = 1e13

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The node of a worker "node/boot": the part of its name that names the machine, the target of a dispatch.
local function node_of(worker) return worker:match('^(.*)/') end

-- Returns true if a worker that began an Op, and did not report that it left the Op, is alive: it renews a lease on its
-- own name. When `worker` is a new process of the same node, the process before it is dead.
local function is_heard(boot, worker)
  local life = 'tinsmith:lease:' .. boot
  if node_of(boot) == node_of(worker) then redis.call('DEL', life) end
  return redis.call('EXISTS', life) == 1
end

-- Begin an Op or a sampling request. Each worker that began it before and is missed counts as an attempt. A worker that
-- is alive again was only cut off, and no longer counts. `former` maps these workers to the ms when each was first
-- missed, or to 0. Returns the number of attempts, and 1 if one is of a worker missed for less than a lease, else 0.
local function begin(op, worker, lease_ms)
  local found = redis.call('HMGET', op, 'runner', 'former')
  local former, now, more, doubtful = cjson.decode(found[2] or '{}'), now_ms(), 0, 0
  if found[1] then former[found[1]] = former[found[1]] or 0 end
  for boot, missed in pairs(former) do
    if boot == worker or is_heard(boot, worker) then
      if missed > 0 then more = more - 1 end
      former[boot] = boot ~= worker and 0 or nil
    else
      if missed == 0 then
        more = more + 1
        former[boot] = now
      end
      if node_of(boot) ~= node_of(worker) and now - former[boot] < tonumber(lease_ms) then doubtful = 1 end
    end
  end
  redis.call('HSET', op, 'runner', worker, 'former', cjson.encode(former))
  return redis.call('HINCRBY', op, 'attempts', more), doubtful
end

-- Note that a live worker no longer runs an Op or a sampling request: its start does not count as an attempt.
local function leave(op, worker)
  local found = redis.call('HMGET', op, 'runner', 'former')
  if found[1] == worker then redis.call('HDEL', op, 'runner') end
  local former = cjson.decode(found[2] or '{}')
  if former[worker] then
    if former[worker] > 0 then redis.call('HINCRBY', op, 'attempts', -1) end
    former[worker] = nil
    redis.call('HSET', op, 'former', cjson.encode(former))
  end
end

-- Add a run to the runs of its project and its key ('SADD'), or remove it ('SREM'). An ended run is not added.
local function list_run(model, how)
  local found = redis.call('HMGET', 'tinsmith:models:' .. model, 'owner', 'key', 'ended')
  if not found[1] or (found[3] and how == 'SADD') then return end
  redis.call(how, 'tinsmith:runs:project:' .. cjson.decode(found[1]), model)
  local key = cjson.decode(found[2] or '""')
  if key ~= '' then redis.call(how, 'tinsmith:runs:key:' .. key, model) end
end

-- Register a model with nothing applied. Its fields are ARGV from `first` on: field, value, ...
local function register_model(model, first)
  redis.call('HSET', 'tinsmith:models:' .. model, 'applied', -1, 'epoch', 0, 'worker', '', 'snapshot', '',
             'snapshot_seq', -1, unpack(ARGV, first))
  redis.call('ZADD', 'tinsmith:index:models', 0, model)
  list_run(model, 'SADD')
end

-- The queue that a model's trainers read; train_queue in app/dispatch.py must agree.
local function train_queue(model)
  local found = redis.call('HMGET', 'tinsmith:models:' .. model, 'base_model', 'full')
  return (found[2] == 'true' and 'full.' or 'train.') .. cjson.decode(found[1])
end

-- The waiting Op of a model at a seq: {model id, seq, kind, bytes, 1 if it is fresh, owner as JSON}; nil without an Op.
local function head_of(model, seq)
  local request = string.format('%s:%d', model, seq)
  local op = redis.call('HMGET', 'tinsmith:op:' .. request, 'kind', 'doomed', 'attempts', 'runner', 'former')
  if not op[1] then return nil end
  local fresh = not op[2] and tonumber(op[3]) == 0 and not op[4] and (op[5] or '{}') == '{}'
  local size = redis.call('STRLEN', 'tinsmith:payload:' .. request)
  local owner = redis.call('HGET', 'tinsmith:models:' .. model, 'owner') or '""'
  return {model, tonumber(seq), op[1], size, fresh and 1 or 0, owner}
end

-- The last hour whose pages are closed; -1 while no page is closed.
local function pages_closed()
  return tonumber(redis.call('GET', 'tinsmith:pages_closed') or -1)
end

local function hour_now()
  return math.floor(now_ms() / 3600000)
end

-- The key of a project's page of a book for an hour; for a closed hour, of the first page that is still open.
local function page_of(book, project, hour)
  hour = math.max(hour, pages_closed() + 1)
  local name = book .. '/' .. project .. '/' .. hour
  redis.call('ZADD', 'tinsmith:pages', hour, name)
  return 'tinsmith:page:' .. name
end

-- Count the usage of an Op or a sample for the project that owns its model or sampler (`record` is that record's key)
-- now. `usage`: JSON, amounts by kind. The page stores the user of every session on it, because the session's own
-- record is deleted some day.
local function count_usage(record, usage)
  local found = usage ~= '{}' and redis.call('HMGET', record, 'owner', 'session_id', 'base_model')
  if not found or not found[1] then return end
  local session, base = cjson.decode(found[2]), cjson.decode(found[3])
  local page = page_of('usage', cjson.decode(found[1]), hour_now())
  for kind, amount in pairs(cjson.decode(usage)) do
    redis.call('HINCRBY', page, kind .. ' ' .. session .. ' ' .. base, amount)
  end
  if redis.call('HEXISTS', page, 'session ' .. session) == 0 then
    local about = redis.call('HMGET', 'tinsmith:sessions:' .. session, 'user', 'user_metadata')
    local text = '{"user": ' .. (about[1] or '""') .. ', "user_metadata": ' .. (about[2] or '{}') .. '}'
    redis.call('HSET', page, 'session ' .. session, text)
  end
end

-- Doom the Ops that wait behind a lost gradient, up to and including the next optim_step: they fail with `reason`.
local function doom(model, seq, reason)
  for _, later in ipairs(redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, '+inf')) do
    local op = 'tinsmith:op:' .. model .. ':' .. later
    redis.call('HSETNX', op, 'doomed', reason)
    if redis.call('HGET', op, 'kind') == 'optim_step' then break end
  end
end

-- The prefixes of a model's adapters that are not in the object store yet. '0' is the character after '/'.
local function handed_over(model)
  local prefix = 'models/' .. model
  return redis.call('ZRANGEBYLEX', 'tinsmith:index:handovers', '[' .. prefix .. '/', '(' .. prefix .. '0')
end

-- The object-store prefix of the adapter for a sampler's next request; '' for the base model.
local function adapter_of(sampler)
  local found = redis.call('HMGET', 'tinsmith:samplers:' .. sampler, 'prefix', 'follows')
  local follows = cjson.decode(found[2] or '""')
  local newest = follows ~= '' and redis.call('HGET', 'tinsmith:models:' .. follows, 'inflight')
  return cjson.decode(newest or found[1] or '""')
end

-- Returns true if a session (its id as JSON) ended at least `least` ms ago and was not reopened since.
local function is_retired(session, least)
  local ended = redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))
  return ended and now_ms() - ended >= tonumber(least)
end

-- Note that a session (its id as JSON, or false) is in use. An expired session is open again; one that its client
-- finished keeps that status.
local function hear(session, now)
  if not session then return end
  local id = cjson.decode(session)
  if redis.call('ZADD', 'tinsmith:sessions_heard', now, id) == 1 then
    local prefix = id .. ':train:'  -- it may have ended before, and its runs have been taken out
    for _, model in ipairs(redis.call('ZRANGEBYLEX', 'tinsmith:index:models', '[' .. prefix, '(' .. prefix .. '\255')) do
      list_run(model, 'SADD')
    end
  end
  redis.call('ZREM', 'tinsmith:sessions_ended', id)
  local key = 'tinsmith:sessions:' .. id
  if redis.call('HGET', key, 'status') == '"expired"' then redis.call('HSET', key, 'status', '"open"') end
end

-- Count a payload that was just stored. A payload worth a separate object is listed for spilling, the large ones first.
local function count_payload(request, size, now)
  redis.call('INCRBY', 'tinsmith:payload_bytes', size)
  if size >= LIMITS.spill_least then
    redis.call('ZADD', 'tinsmith:spillable', size > LIMITS.spill_at_once and 0 or now, request)
  end
end

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

-- Reads a number from INFO's text; the plain search is many times faster than a single pattern.
local function number(info, name)
  local _, last = info:find('\n' .. name .. ':', 1, true)
  return tonumber(info:match('^%d+', last + 1))
end

-- The error that refuses a payload of `size` bytes, or a record (size 0); nil while there is room.
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

-- Count a sampling request's sequences for its payers (sign 1), or stop counting them (sign -1).
local function count_samples(request, sign)
  local found = redis.call('HMGET', 'tinsmith:op:' .. request, 'payers', 'rows')
  for payer in (found[1] or ''):gmatch('%S+') do
    local held = redis.call('HINCRBY', 'tinsmith:sampling_of', payer, sign * (found[2] or 1))
    if held == 0 then redis.call('HDEL', 'tinsmith:sampling_of', payer) end
  end
end

-- The key of an adapter's affinity, the node that samples with it. Requests for the base model use the sampler's id.
local function home_of(request, adapter)
  return 'tinsmith:home:' .. (adapter and adapter ~= '' and adapter or request:match('^(.*):%d+$'))
end

-- Count a sampling request's sequences at one node; with '', at no node. Returns the node where they counted before.
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

-- The key of a project's throttled requests, the oldest first.
local function held_key(queue, project) return 'tinsmith:held:' .. queue .. '/' .. project end

-- Remove a request from the throttled ones.
local function unhold(request, queue, project)
  local key = held_key(queue, project)
  redis.call('ZREM', key, request)
  if redis.call('EXISTS', key) == 0 then redis.call('SREM', 'tinsmith:holding:' .. queue, project) end
end

-- Stop counting a dispatched or throttled sampling request for its project. A requeued request counts for none.
local function leave_project(request, queue)
  local found = redis.call('HMGET', 'tinsmith:op:' .. request, 'ring', 'rows')
  local project = redis.call('HGET', 'tinsmith:future:' .. request, 'owner')
  if found[1] == 'rung' then
    local rung = 'tinsmith:rung:' .. queue
    if redis.call('HINCRBY', rung, project, -found[2]) == 0 then redis.call('HDEL', rung, project) end
    redis.call('HINCRBY', 'tinsmith:rung_rows', queue, -found[2])
  elseif found[1] == 'held' then
    unhold(request, queue, project)
  end
end

-- Stop counting a sampling request in its queue, at its node and for its sampler; call before op:<request> is deleted.
local function leave_queue(request, sampler)
  local queue = redis.call('HGET', 'tinsmith:pending_queue', request)
  local tokens = queue and redis.call('HGET', 'tinsmith:sampling:' .. queue, request)
  if tokens then
    place(request, queue, '')
    leave_project(request, queue)
    count_samples(request, -1)
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

-- Note that a sampler's request finished, for polls of all requests of one clone; ids.target_of must agree on the key.
local function note_completion(sampler, seq, request, keep_s)
  local key = 'tinsmith:completed:' .. sampler .. '/' .. (#seq > 9 and seq:sub(1, -10) or '0')
  redis.call('ZADD', key, redis.call('INCR', 'tinsmith:completions'), request)
  redis.call('EXPIRE', key, keep_s)
end

-- Store a sampling request's result and delete all its other state; the first result stays.
-- Returns true if this result was the first.
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
