#!lua flags=allow-oom
-- End a sampling request that nobody waits for any more, unless it has a result. ARGV: request id, seconds to keep,
-- type and body of its result. Returns 1, or 0 when there was a result already.
local charged, began = charged_for(ARGV[1]), redis.call('EXISTS', 'tinsmith:lease:' .. ARGV[1]) == 1
if not abort_sample(ARGV[1], ARGV[2], ARGV[3], ARGV[4]) then return 0 end
-- What a sampler draws until it hears of it is never told.
if not began then give_back(charged, '{}') end
return 1
