-- Journal an Op and its pending future, once. ARGV: model id, seq, request id, kind, payload, digest,
-- key of a staged payload (or ''), charge (or ''), entry in its project's audit log (or ''), and for a model to
-- register in the same step: field, value, ...
-- Returns {outcome, lease holder}; the outcome is fresh | repeat | conflict | refused (with its reason instead of the
-- holder) | consumed | unknown | ended. Returns {'limited', ...} as `over_limit` in limits.lua does.
local model, seq, request, staged = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[7]

-- If later Ops wait for this one, its refusal would keep them from ever draining.
local function is_awaited(applied)
  return seq == applied + 1 and redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. seq, '+inf') > 0
end

-- The SDK sends the first part of a large batch last. The later parts passed the rate limits themselves; later calls
-- of other kinds did not, and do not count here. A call more than PARTS seqs ahead is no part of the batch; otherwise
-- one call far ahead would exempt all calls before it from the rates.
local PARTS = 128

local function is_awaited_by_parts(applied)
  if seq ~= applied + 1 then return false end
  for _, later in ipairs(redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, seq + PARTS)) do
    local kind = redis.call('HGET', 'tinsmith:op:' .. model .. ':' .. later, 'kind')
    if kind == 'forward_backward' or kind == 'forward' then return true end
  end
  return false
end

local function store(now)
  local payload = 'tinsmith:payload:' .. request
  if staged == '' then
    redis.call('SET', payload, ARGV[5])
  else
    redis.call('RENAME', staged, payload)
    redis.call('PERSIST', payload)
  end
  count_payload(request, redis.call('STRLEN', payload), now)
end

local function admit()
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'applied', 'owner', 'ended')
  if not head[1] and #ARGV < 10 then return {'unknown', ''} end
  local holder = redis.call('GET', 'tinsmith:lease:' .. model) or ''
  local known = redis.call('HMGET', 'tinsmith:future:' .. request, 'digest', 'refused')
  if known[2] then return {'refused', known[2]} end
  if known[1] then return {known[1] == ARGV[6] and 'repeat' or 'conflict', holder} end
  if head[3] then return {'ended', ''} end
  local applied = tonumber(head[1] or -1)
  if seq <= applied then return {'consumed', ''} end
  if staged ~= '' and redis.call('EXISTS', staged) == 0 then
    return redis.error_reply('FULL the call took so long that its content has lapsed')
  end
  local refusal = no_room(staged == '' and #ARGV[5] or redis.call('STRLEN', staged))
  if refusal and not is_awaited(applied) then return refusal end
  local limited = ARGV[8] ~= '' and take(cjson.decode(ARGV[8]), is_awaited_by_parts(applied))
  if limited then return limited end
  if not head[1] then
    register_model(model, 10)
    head = redis.call('HMGET', 'tinsmith:models:' .. model, 'applied', 'owner')
  end
  local now = now_ms()
  hear(redis.call('HGET', 'tinsmith:models:' .. model, 'session_id'), now)
  redis.call('HSET', 'tinsmith:op:' .. request, 'kind', ARGV[4], 'attempts', 0, 'admitted', now)
  store(now)
  redis.call('HSET', 'tinsmith:future:' .. request, 'kind', ARGV[4], 'model', model,
             'owner', cjson.decode(head[2]), 'digest', ARGV[6], 'state', 'pending', 'admitted', now)
  redis.call('ZADD', 'tinsmith:journal:' .. model, seq, seq)
  redis.call('HSET', 'tinsmith:models:' .. model, 'last_request', now)
  if ARGV[9] ~= '' then
    redis.call('HSET', page_of('audit', cjson.decode(head[2]), hour_now()), request, string.format('%.0f ', now) .. ARGV[9])
  end
  redis.call('ZADD', 'tinsmith:pending', 'NX', now, model)
  redis.call('HSET', 'tinsmith:pending_queue', model, train_queue(model))
  return {'fresh', holder}
end

local answer = admit()
if staged ~= '' then redis.call('DEL', staged) end  -- else a repeat's would stay until it expires
return answer
