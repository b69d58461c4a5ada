#!lua flags=allow-oom
-- End the unfinished requests of samplers that no longer exist, or whose session has ended and has not been reopened.
-- ARGV: most requests, seconds to keep, type and body of their result. Returns the number of requests ended.
local ended, most = 0, tonumber(ARGV[1])

local function is_over(sampler)
  local session = redis.call('HGET', 'tinsmith:samplers:' .. sampler, 'session_id')
  return not session or redis.call('ZSCORE', 'tinsmith:sessions_ended', cjson.decode(session))
end

for _, sampler in ipairs(redis.call('SMEMBERS', 'tinsmith:samplers_asked')) do
  if ended < most and is_over(sampler) then
    for _, request in ipairs(redis.call('SRANDMEMBER', 'tinsmith:sampled:' .. sampler, most - ended)) do
      if abort_sample(request, ARGV[2], ARGV[3], ARGV[4]) then ended = ended + 1 end
    end
  end
end
return ended
