-- Consume a seq that will never run, and doom what already waits behind it up to the next optim_step.
-- ARGV: model id, seq, reason, kind to journal (skip | drop_gradients). Returns 1, or 0 when the seq is taken.
local model, seq, reason = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local applied = redis.call('HGET', 'tinsmith:models:' .. model, 'applied')
if not applied or seq <= tonumber(applied) then return 0 end
local request = model .. ':' .. ARGV[2]
if redis.call('EXISTS', 'tinsmith:op:' .. request) == 1 then return 0 end
local waiting = redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, '+inf')
for _, later in ipairs(waiting) do
  local op = 'tinsmith:op:' .. model .. ':' .. later
  redis.call('HSETNX', op, 'doomed', reason)
  if redis.call('HGET', op, 'kind') == 'optim_step' then break end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', ARGV[4], 'payload', '', 'attempts', 0, 'admitted', now)
redis.call('HSET', 'tinsmith:future:' .. request, 'refused', reason)
redis.call('ZADD', 'tinsmith:journal:' .. model, seq, seq)
redis.call('ZADD', 'tinsmith:pending', 'NX', now, model)
local base = redis.call('HGET', 'tinsmith:models:' .. model, 'base_model')
redis.call('HSET', 'tinsmith:pending_queue', model, 'train.' .. cjson.decode(base))
return 1
