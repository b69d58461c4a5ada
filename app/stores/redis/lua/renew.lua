#!lua flags=allow-oom
-- Extend the leases that are still ours, and say that we live. ARGV: worker, lease in ms, ids... Returns the ids that are
-- not. Whoever dies with an Op is missed when its lease lapses, not later: both are renewed in one step.
redis.call('SET', 'tinsmith:lease:' .. ARGV[1], ARGV[1], 'PX', ARGV[2])
local lost = {}
for i = 3, #ARGV do
  local key = 'tinsmith:lease:' .. ARGV[i]
  if redis.call('GET', key) == ARGV[1] then
    redis.call('PEXPIRE', key, ARGV[2])
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
