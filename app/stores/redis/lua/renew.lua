#!lua flags=allow-oom
-- Extend the leases that the worker still holds, and the lease on its own name, which shows that it lives. ARGV:
-- worker, lease in ms, ids... Returns the ids whose leases are lost. All are renewed in one step, so that a worker that
-- dies with an Op is missed when the Op's lease lapses, not later.
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
