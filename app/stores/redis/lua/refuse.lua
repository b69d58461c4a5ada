-- Consume a seq that will never run. If that loses a gradient, doom the Ops behind it, up to the next optim_step.
-- ARGV: model id, seq, reason, kind to journal (skip | lost_batch | drop_gradients).
-- Returns 1, or 0 when the seq is taken.
local model, seq, reason = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local applied = redis.call('HGET', 'tinsmith:models:' .. model, 'applied')
if not applied or seq <= tonumber(applied) then return 0 end
if redis.call('HEXISTS', 'tinsmith:models:' .. model, 'ended') == 1 then return 0 end
local request = model .. ':' .. ARGV[2]
if redis.call('EXISTS', 'tinsmith:op:' .. request) == 1 then return 0 end
if ARGV[4] ~= 'skip' then doom(model, seq, reason) end
local now = now_ms()
redis.call('HSET', 'tinsmith:op:' .. request, 'kind', ARGV[4], 'attempts', 0, 'admitted', now,
           'doomed', reason)
redis.call('HSET', 'tinsmith:future:' .. request, 'refused', reason)
redis.call('ZADD', 'tinsmith:journal:' .. model, seq, seq)
redis.call('ZADD', 'tinsmith:pending', 'NX', now, model)
redis.call('HSET', 'tinsmith:pending_queue', model, train_queue(model))
return 1
