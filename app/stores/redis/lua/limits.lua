-- The usage and the limits of payers (app/domain/limits.py).

-- part: list_run
-- Add a run to the runs of its project and its key ('SADD'), or remove it ('SREM'). An ended run is not added.
local function list_run(model, how)
  local found = redis.call('HMGET', 'tinsmith:models:' .. model, 'owner', 'key', 'ended')
  if not found[1] or (found[3] and how == 'SADD') then return end
  redis.call(how, 'tinsmith:runs:project:' .. cjson.decode(found[1]), model)
  local key = cjson.decode(found[2] or '""')
  if key ~= '' then redis.call(how, 'tinsmith:runs:key:' .. key, model) end
end

-- part: live_runs
-- Returns true for a run that is live: not ended, not failed, and not unloaded without waiting calls, in a session that
-- has not ended.
local function is_live(model)
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'session_id', 'ended', 'state', 'unloaded', 'last_request')
  local unloaded = head[4] and tonumber(head[5] or 0) <= tonumber(head[4])
                   and not redis.call('ZSCORE', 'tinsmith:pending', model)
  return head[1] and not head[2] and head[3] ~= '"failed"' and not unloaded
         and redis.call('ZSCORE', 'tinsmith:sessions_heard', cjson.decode(head[1]))
end

-- part: count_live
-- To look at one and take it off takes 20 us, and everybody else waits for the server meanwhile.
local LOOKED_AT_ONCE = 500

-- The number of a payer's live runs or sessions, by their list. A new run or session is listed at once. One that expires
-- stays on the list until this function or a maintenance task checks it and removes it. So a number up to LOOKED_AT_ONCE
-- is right, and a larger one may include some that just ended. With `most`, nothing is looked at while the list is no
-- longer.
local function count_live(list, live, most)
  local listed = redis.call('SCARD', list)
  if most and listed <= most then return listed end
  for _, id in ipairs(redis.call('SRANDMEMBER', list, LOOKED_AT_ONCE)) do
    if not live(id) then redis.call('SREM', list, id) end
  end
  return redis.call('SCARD', list)
end

-- part: live_models
-- needs: count_live, live_runs
local function live_models(payer, most) return count_live('tinsmith:runs:' .. payer.name, is_live, most) end

-- part: stored
-- needs: now_ms
-- The key of the bytes of all checkpoints by payer. `sum_stored` makes these sums on a state server that has none yet.
local STORED = 'tinsmith:stored'

-- The key of the paths of a project's checkpoints; `_listed` in records.py finds out whether they are complete.
local function checkpoints_of(project) return 'tinsmith:checkpoints_of:' .. project end

-- Add a checkpoint's bytes to those of its payers, and its path to its project's (sign 1), or remove both (sign -1).
local function add_stored(path, sign)
  local found = redis.call('HMGET', 'tinsmith:checkpoints:' .. path, 'owner', 'key', 'size_bytes')
  if not found[3] then return end
  local project = cjson.decode(found[1])
  redis.call(sign > 0 and 'SADD' or 'SREM', checkpoints_of(project), path)
  local size = 0 + sign * found[3]  -- never -0, which is no integer
  redis.call('HINCRBY', STORED, 'project:' .. project, size)
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

-- part: reserved
-- needs: now_ms
-- Room for checkpoints that are not made yet, by their paths. A reservation counts for its payers until the checkpoint is
-- recorded, or the reservation is released or lapses.
local RESERVED, RESERVATIONS, LAPSES = 'tinsmith:reserved', 'tinsmith:reservations', 'tinsmith:reservations_lapse'

-- Count a reservation {bytes, payers, lapses} for its payers (sign 1), or stop counting it (sign -1). Its bytes are a
-- text: cjson rounds numbers to 14 digits.
local function count_reserved(reservation, sign)
  for _, payer in ipairs(reservation.payers) do
    if redis.call('HINCRBY', RESERVED, payer, 0 + sign * reservation.bytes) == 0 then redis.call('HDEL', RESERVED, payer) end
  end
end

local function set_reservation(path, reservation)
  redis.call('HSET', RESERVATIONS, path, cjson.encode(reservation))
  redis.call('ZADD', LAPSES, reservation.lapses, path)
  count_reserved(reservation, 1)
end

-- End a reservation. Returns it, or nil if there is none.
local function end_reservation(path)
  local found = redis.call('HGET', RESERVATIONS, path)
  if not found then return nil end
  local reservation = cjson.decode(found)
  redis.call('HDEL', RESERVATIONS, path)
  redis.call('ZREM', LAPSES, path)
  count_reserved(reservation, -1)
  return reservation
end

local function end_lapsed()
  for _, path in ipairs(redis.call('ZRANGEBYSCORE', LAPSES, '-inf', now_ms())) do end_reservation(path) end
end

local function bytes_reserved(payer)
  end_lapsed()
  return tonumber(redis.call('HGET', RESERVED, payer.name) or 0)
end

-- part: routed
-- Count the bytes of a request's routes (app/stores/objects/routes.py) for its payers, on their day.
local function count_routes(day, payers, bytes)
  redis.call('SADD', 'tinsmith:route_days', day)
  for payer in payers:gmatch('%S+') do redis.call('HINCRBY', 'tinsmith:route_bytes:' .. day, payer, bytes) end
end

local function bytes_routed(payer)
  local bytes = 0
  for _, day in ipairs(redis.call('SMEMBERS', 'tinsmith:route_days')) do
    bytes = bytes + (redis.call('HGET', 'tinsmith:route_bytes:' .. day, payer.name) or 0)
  end
  return bytes
end

-- part: storage
-- needs: reserved, routed, stored
-- The bytes of adapters of saves without a path, as the last round of their maintenance task measured them.
local function bytes_ephemeral(payer) return redis.call('HGET', 'tinsmith:ephemeral_bytes', payer.name) or 0 end

-- The bytes that count against a payer's storage_bytes.
local function bytes_used(payer)
  return bytes_stored(payer) + bytes_reserved(payer) + bytes_ephemeral(payer) + bytes_routed(payer)
end

-- part: rates
-- Each rate has a token bucket of BURST_S seconds. A call passes while anything is left in the bucket, and always takes
-- its full amount. So a large call leaves a debt, and other calls cannot keep it out for ever.
local BURST_S = 10

local function rate_key(payer) return 'tinsmith:rates:' .. payer.name end

-- The amount missing in a bucket, in calls or tokens. The state of the last call is stored, so that a new limit holds
-- at once. A last call in the future shows that the server's clock was set back. The time until then counts as time
-- since then: as no time at all, nothing would come back until the clock is there again.
local function missing(payer, rate, limit, now)
  local found = redis.call('HMGET', rate_key(payer), rate, rate .. '_at')
  return found[1] and math.max(0, found[1] - math.abs(now - found[2]) / 1000 * limit) or 0
end

-- part: take
-- needs: live_models, live_sessions, now_ms, rates, storage
-- The first limit of a payer that refuses a charge: {'limited', its name, payer, amount used, the limit, ms to wait};
-- nil if no limit refuses it. A call that later parts of its batch depend on (`awaited`) skips the rate limits and the
-- budget.
local function over_limit(payer, charge, awaited, now)
  local limits = payer.limits
  local function over(name, used, wait)
    return {'limited', name, payer.name, string.format('%.15g', used), string.format('%.15g', limits[name]),
            string.format('%.0f', wait)}
  end
  if charge.models > 0 and limits.live_models then
    local most = limits.live_models - charge.models
    local live = live_models(payer, most)
    if live > most then return over('live_models', live, 0) end
  end
  if charge.sessions > 0 and limits.live_sessions then
    local most = limits.live_sessions - charge.sessions
    local live = live_sessions(payer, most)
    if live > most then return over('live_sessions', live, 0) end
  end
  if charge.stores and limits.storage_bytes then
    local stored = bytes_used(payer)
    if stored + math.max(charge.stored, 1) > limits.storage_bytes then return over('storage_bytes', stored, 0) end
  end
  if charge.samples > 0 and limits.concurrent_samples then
    local held = tonumber(redis.call('HGET', 'tinsmith:sampling_of', payer.name) or 0)
    if held > 0 and held + charge.samples > limits.concurrent_samples then return over('concurrent_samples', held, 1000) end
  end
  if charge.spends and limits.monthly_budget and payer.kind == 'project' and not awaited
     and charge.spent >= limits.monthly_budget then
    return over('monthly_budget', charge.spent, 0)
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

-- The refusal of `over_limit` for a call, or nil.
local function over_limits(charge, awaited)
  local now = now_ms()
  for _, payer in ipairs(charge.payers) do
    local limited = over_limit(payer, charge, awaited, now)
    if limited then return limited end
  end
end

-- Charge a call to all its payers, or to none. Returns as `over_limits` does.
local function take(charge, awaited)
  local limited = over_limits(charge, awaited)
  if limited then return limited end
  local now = now_ms()
  for _, payer in ipairs(charge.payers) do pay(payer, charge, now) end
end

-- part: refund
-- The payers of a sampling request that has not ended, the tokens they were charged for it, and the run that made its
-- weights, if any.
local function charged_for(request)
  local queue = redis.call('HGET', 'tinsmith:pending_queue', request)
  local tokens = queue and redis.call('HGET', 'tinsmith:sampling:' .. queue, request)
  local found = redis.call('HMGET', 'tinsmith:op:' .. request, 'payers', 'adapter')
  return {payers = found[1] or '', tokens = tonumber(tokens or 0), run = (found[2] or ''):match('^models/([^/]+)/')}
end

-- Refund the tokens that a request was charged for and did not use. `usage`: JSON, amounts by kind.
local function give_back(charged, usage)
  local unused = charged.tokens
  for kind, amount in pairs(cjson.decode(usage)) do unused = unused - (kind == 'device' and 0 or amount) end
  for payer in charged.payers:gmatch('%S+') do
    local key = 'tinsmith:rates:' .. payer
    local taken = redis.call('HGET', key, 'tokens')
    if taken then redis.call('HSET', key, 'tokens', string.format('%.6f', math.max(0, taken - unused))) end
  end
end

-- script: take
-- needs: take
-- Charge a call that is not journalled. ARGV: charge. Returns {}, or the refusal of `over_limit` in limits.lua.
return take(cjson.decode(ARGV[1])) or {}

-- script: reserve
-- needs: no_room, now_ms, reserved, take
-- Charge a call, and reserve room for the checkpoint that it is about to make, in the place of an earlier reservation for
-- this checkpoint. ARGV: path, charge (or ''), names of its payers, bytes, ms until the reservation lapses, and for an
-- upload to record in the same step, unless it exists: its id, field, value, ...
-- Returns {}, or the refusal of `over_limit`; the earlier reservation stays then.
local upload = ARGV[6] and 'tinsmith:uploads:' .. ARGV[6]
if upload and redis.call('EXISTS', upload) == 1 then return {} end
local refusal = no_room(0)
if refusal then return refusal end
local payers = {}
for payer in ARGV[3]:gmatch('%S+') do payers[#payers + 1] = payer end
end_lapsed()
local earlier = end_reservation(ARGV[1])
local limited = ARGV[2] ~= '' and take(cjson.decode(ARGV[2]))
if limited then
  if earlier then set_reservation(ARGV[1], earlier) end
  return limited
end
set_reservation(ARGV[1], {bytes = ARGV[4], payers = payers, lapses = now_ms() + ARGV[5]})
if upload then
  redis.call('HSET', upload, unpack(ARGV, 7))
  redis.call('ZADD', 'tinsmith:index:uploads', 0, ARGV[6])
end
return {}

-- script: end_reservation flags=allow-oom
-- needs: reserved
-- End a reservation. ARGV: path. Returns 0.
end_reservation(ARGV[1])
return 0

-- script: set_ephemeral flags=allow-oom
-- Set the bytes of adapters of saves without a path. ARGV: payer, bytes, ... of all who have some. Returns 0.
redis.call('DEL', 'tinsmith:ephemeral_bytes')
for i = 1, #ARGV, 2 do redis.call('HSET', 'tinsmith:ephemeral_bytes', ARGV[i], ARGV[i + 1]) end
return 0

-- script: forget_routes flags=allow-oom
-- Stop counting the routes of the days before a day, whose files are deleted. ARGV: the day. Returns 0.
for _, day in ipairs(redis.call('SMEMBERS', 'tinsmith:route_days')) do
  if tonumber(day) < tonumber(ARGV[1]) then
    redis.call('SREM', 'tinsmith:route_days', day)
    redis.call('DEL', 'tinsmith:route_bytes:' .. day)
  end
end
return 0

-- script: used flags=allow-oom
-- needs: live_models, now_ms, rates, storage
-- Read a payer's usage of its limits. ARGV: its kind, its id, its limits of calls and of tokens per second, or ''.
-- Returns {live models, bytes that count as stored, unfinished sequences, calls per second, tokens per second}; both rates
-- are text, '' without a limit.
local payer = {kind = ARGV[1], id = ARGV[2], name = ARGV[1] .. ':' .. ARGV[2]}
local now = now_ms()

local function average(rate, limit)
  return limit == '' and '' or tostring(missing(payer, rate, tonumber(limit), now) / BURST_S)
end

return {live_models(payer), bytes_used(payer),
        tonumber(redis.call('HGET', 'tinsmith:sampling_of', payer.name) or 0),
        average('requests', ARGV[3]), average('tokens', ARGV[4])}
