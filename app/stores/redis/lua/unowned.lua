#!lua flags=allow-oom
-- What waits next in the models of a queue that nobody owns, longest without progress first. ARGV: queue, how many of all
-- that is pending to look at. Returns a row for each, as `head_of` makes it.
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
