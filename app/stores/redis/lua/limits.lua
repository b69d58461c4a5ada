-- Put before every script, behind prelude.lua: what payers have, and what their limits let in (app/domain/limits.py).

-- Where the bytes of all checkpoints are summed up by payer. A state server that has no sums yet gets them here.
local STORED = 'tinsmith:stored'

local function add_stored(path, sign)
  local found = redis.call('HMGET', 'tinsmith:checkpoints:' .. path, 'owner', 'key', 'size_bytes')
  if not found[3] then return end
  local size = 0 + sign * found[3]  -- never -0, which is no integer
  redis.call('HINCRBY', STORED, 'project:' .. cjson.decode(found[1]), size)
  local key = cjson.decode(found[2] or '""')
  if key ~= '' then redis.call('HINCRBY', STORED, 'key:' .. key, size) end
end

local function sum_stored()
  if redis.call('EXISTS', STORED) == 1 then return end
  redis.call('HSET', STORED, 'since', now_ms())
  for _, path in ipairs(redis.call('ZRANGE', 'tinsmith:index:checkpoints', 0, -1)) do add_stored(path, 1) end
end

local function bytes_stored(payer)
  sum_stored()
  return tonumber(redis.call('HGET', STORED, payer.name) or 0)
end

-- Make, change or delete a record by `change`; a checkpoint's bytes, and a run, count for whose it was, and then for whose
-- it is.
local function change_record(namespace, id, change)
  if namespace == 'checkpoints' then
    sum_stored()
    add_stored(id, -1)
    change()
    add_stored(id, 1)
  elseif namespace == 'models' then
    list_run(id, 'SREM')
    change()
    list_run(id, 'SADD')
  else
    change()
  end
end

-- A state server that has no lists of runs yet gets them here.
local function list_runs()
  if redis.call('SETNX', 'tinsmith:runs_listed', now_ms()) == 0 then return end
  for _, model in ipairs(redis.call('ZRANGE', 'tinsmith:index:models', 0, -1)) do list_run(model, 'SADD') end
end

-- How many runs of a payer are live: not ended nor unloaded nor failed, in a session that has not ended. Those that ended,
-- or whose session did, are taken out of its list; `hear` puts them back with their session.
local function live_models(payer)
  list_runs()
  local listed, live = 'tinsmith:runs:' .. payer.name, 0
  for _, model in ipairs(redis.call('SMEMBERS', listed)) do
    local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'session_id', 'ended', 'state', 'unloaded', 'last_request')
    if not head[1] or head[2] or not redis.call('ZSCORE', 'tinsmith:sessions_heard', cjson.decode(head[1])) then
      redis.call('SREM', listed, model)
    elseif head[3] ~= '"failed"' and not (head[4] and tonumber(head[5] or 0) <= tonumber(head[4])) then
      live = live + 1
    end
  end
  return live
end

-- Each rate has a bucket of what it gives in so many seconds. A call passes while anything is left, and takes all it takes:
-- so a large one leaves a debt, and no other can keep it out for ever.
local BURST_S = 10

local function rate_key(payer) return 'tinsmith:rates:' .. payer.name end

-- What is missing in a bucket, in calls or tokens. It is kept as it was at the last call, so that a new limit holds at once.
local function missing(payer, rate, limit, now)
  local found = redis.call('HMGET', rate_key(payer), rate, rate .. '_at')
  return found[1] and math.max(0, found[1] - (now - found[2]) / 1000 * limit) or 0
end

-- The first limit of a payer that does not let a charge in: {'limited', its name, payer, what is used, the limit, ms to
-- wait}; nil if there is none. Whom parts of its batch wait for does not wait for a rate.
local function over_limit(payer, charge, awaited, now)
  local limits = payer.limits
  local function over(name, used, wait)
    return {'limited', name, payer.name, string.format('%.15g', used), string.format('%.15g', limits[name]),
            string.format('%.0f', wait)}
  end
  if charge.models > 0 and limits.live_models then
    local live = live_models(payer)
    if live + charge.models > limits.live_models then return over('live_models', live, 0) end
  end
  if charge.stores and limits.storage_bytes then
    local stored = bytes_stored(payer)
    if stored + math.max(charge.stored, 1) > limits.storage_bytes then return over('storage_bytes', stored, 0) end
  end
  if charge.samples > 0 and limits.concurrent_samples then
    local held = tonumber(redis.call('HGET', 'tinsmith:sampling_of', payer.name) or 0)
    if held > 0 and held + charge.samples > limits.concurrent_samples then return over('concurrent_samples', held, 1000) end
  end
  for rate, amount in pairs({requests = 1, tokens = charge.tokens}) do
    local limit = limits[rate .. '_per_s']
    if limit and amount > 0 and not awaited then
      local taken = missing(payer, rate, limit, now)
      if taken >= limit * BURST_S then
        return over(rate .. '_per_s', taken / BURST_S, (taken / limit - BURST_S) * 1000)
      end
    end
  end
end

local function pay(payer, charge, now)
  local longest = 0
  for rate, amount in pairs({requests = 1, tokens = charge.tokens}) do
    local limit = payer.limits[rate .. '_per_s']
    if limit then
      local taken = missing(payer, rate, limit, now) + amount
      redis.call('HSET', rate_key(payer), rate, string.format('%.6f', taken), rate .. '_at', now)
      longest = math.max(longest, taken / limit)
    end
  end
  if longest > 0 then redis.call('EXPIRE', rate_key(payer), string.format('%.0f', longest + 1)) end
end

-- Charge a call to all its payers, or to none: returns what `over_limit` says.
local function take(charge, awaited)
  local now = now_ms()
  for _, payer in ipairs(charge.payers) do
    local limited = over_limit(payer, charge, awaited, now)
    if limited then return limited end
  end
  for _, payer in ipairs(charge.payers) do pay(payer, charge, now) end
end

-- The payers of a sampling request that has not ended, and the tokens they were charged for it.
local function charged_for(request)
  local queue = redis.call('HGET', 'tinsmith:pending_queue', request)
  local tokens = queue and redis.call('HGET', 'tinsmith:sampling:' .. queue, request)
  return {payers = redis.call('HGET', 'tinsmith:op:' .. request, 'payers') or '', tokens = tonumber(tokens or 0)}
end

-- Give back what a request did not take of the tokens it was charged for.
local function give_back(charged, took)
  local unused = charged.tokens - took
  for payer in charged.payers:gmatch('%S+') do
    local key = 'tinsmith:rates:' .. payer
    local taken = redis.call('HGET', key, 'tokens')
    if taken then redis.call('HSET', key, 'tokens', string.format('%.6f', math.max(0, taken - unused))) end
  end
end

-- Close a sampling request that nobody waits for, and tell the worker that may be running it. What it was charged for is
-- given back: at once, or what it did not take once that worker says what it took. Returns as close_sample.
local function abort_sample(request, keep_s, type, body)
  local charged = charged_for(request)
  charged.runner = redis.call('GET', 'tinsmith:lease:' .. request) or nil
  if not close_sample(request, 'failed', type, body, keep_s) then return false end
  if charged.runner then
    redis.call('SET', 'tinsmith:stopped:' .. request, cjson.encode(charged), 'EX', keep_s)
  else
    give_back(charged, 0)
  end
  redis.call('PUBLISH', 'tinsmith:aborted', request)
  return true
end

-- Whoever ran a request that was called off says how many tokens it took.
local function settle_stopped(request, worker, took)
  local key = 'tinsmith:stopped:' .. request
  local charged = cjson.decode(redis.call('GET', key) or '{}')
  if charged.runner == worker then
    redis.call('DEL', key)
    give_back(charged, took)
  end
end
