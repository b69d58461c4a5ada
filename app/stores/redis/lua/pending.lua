-- All that is not terminal, longest without progress first. ARGV: most rows.
-- Returns rows {id, queue, ms waited, next seq or '', kind or '' (the Op has not come), 1 while a worker runs it}
local now = now_ms()
local rows = {}
local waiting = redis.call('ZRANGE', 'tinsmith:pending', 0, ARGV[1] - 1, 'WITHSCORES')
for i = 1, #waiting, 2 do
  local id = waiting[i]
  local holder = redis.call('GET', 'tinsmith:lease:' .. id)
  local applied = redis.call('HGET', 'tinsmith:models:' .. id, 'applied')
  local seq, kind, running
  if applied then
    seq = tonumber(applied) + 1
    local op = redis.call('HMGET', 'tinsmith:op:' .. id .. ':' .. seq, 'kind', 'runner')
    kind, running = op[1] or '', holder and op[2] == holder
  else
    seq, kind, running = '', 'sample', holder
  end
  rows[#rows + 1] = {id, redis.call('HGET', 'tinsmith:pending_queue', id) or '', now - waiting[i + 1],
                     tostring(seq), kind, running and 1 or 0}
end
return rows
