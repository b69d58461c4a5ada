#!lua flags=allow-oom
-- Store a sampling request's result; the first result stays, and its usage is counted. ARGV: request id, state, type,
-- body, seconds to keep, JSON of its usage. Returns 1, or 0 when the request had a result already.
local charged = charged_for(ARGV[1])
if not close_sample(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]) then return 0 end
local took = 0
for _, amount in pairs(cjson.decode(ARGV[6])) do took = took + amount end
give_back(charged, took)
if ARGV[2] == 'done' then count_usage('tinsmith:samplers:' .. ARGV[1]:match('^(.*):%d+$'), ARGV[6]) end
return 1
