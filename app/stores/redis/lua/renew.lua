-- Extend the leases that are still ours. ARGV: worker, lease in ms, ids... Returns the ids that are not.
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
