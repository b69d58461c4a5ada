-- Register a model with nothing applied. ARGV: model id, then field, value, ...
-- Returns 1, or 0 when the model exists already.
if redis.call('EXISTS', 'tinsmith:models:' .. ARGV[1]) == 1 then return 0 end
register_model(ARGV[1], 2)
return 1
