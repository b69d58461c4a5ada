#!lua flags=allow-oom
-- Read the next waiting Op of each model of a queue that no worker owns, the longest without progress first. ARGV:
-- queue, how many entries of `pending` to scan. Returns a row of `head_of` for each.
local rows = {}
local ids = redis.call('ZRANGE', 'tinsmith:pending', 0, ARGV[2] - 1)
if #ids == 0 then return rows end
for i, queue in ipairs(redis.call('HMGET', 'tinsmith:pending_queue', unpack(ids))) do
  if queue == ARGV[1] and redis.call('EXISTS', 'tinsmith:lease:' .. ids[i]) == 0 then
    local applied = redis.call('HGET', 'tinsmith:models:' .. ids[i], 'applied')
    rows[#rows + 1] = applied and head_of(ids[i], applied + 1) or nil
  end
end
return rows
