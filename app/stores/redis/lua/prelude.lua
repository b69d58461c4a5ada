-- Put before every script.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- What already waits behind a lost gradient, up to and including the next optim_step, fails with `reason`.
local function doom(model, seq, reason)
  for _, later in ipairs(redis.call('ZRANGEBYSCORE', 'tinsmith:journal:' .. model, '(' .. seq, '+inf')) do
    local op = 'tinsmith:op:' .. model .. ':' .. later
    redis.call('HSETNX', op, 'doomed', reason)
    if redis.call('HGET', op, 'kind') == 'optim_step' then break end
  end
end
