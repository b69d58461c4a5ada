-- List all models and sampling requests with unfinished calls: the longest without progress first, throttled ones last.
-- ARGV: rows to skip at the start, most rows, most kinds.
-- Returns rows {id, queue, ms waited, next seq or '', 1 while a worker runs it, kinds of the waiting calls from that
-- seq up to a gap, 1 while a sampling request waits for its node to begin, 1 while it is throttled}
local now = now_ms()
local rows, depth = {}, tonumber(ARGV[3])
local waiting = redis.call('ZRANGE', 'tinsmith:pending', ARGV[1], ARGV[1] + ARGV[2] - 1, 'WITHSCORES')
for i = 1, #waiting, 2 do
  local id = waiting[i]
  local holder = redis.call('GET', 'tinsmith:lease:' .. id)
  local applied = redis.call('HGET', 'tinsmith:models:' .. id, 'applied')
  local seq, running, kinds = '', holder, {'sample'}
  local found = redis.call('HMGET', 'tinsmith:op:' .. id, 'node', 'ring')
  local node, held = found[1], found[2] == 'held'
  if applied then
    seq, kinds = tonumber(applied) + 1, {}
    local op = 'tinsmith:op:' .. id .. ':'
    running = holder and redis.call('HGET', op .. seq, 'runner') == holder
    while #kinds < depth do
      local kind = redis.call('HGET', op .. (seq + #kinds), 'kind')
      if not kind then break end
      kinds[#kinds + 1] = kind
    end
  end
  local since = waiting[i + 1] - (held and HELD_MS or 0)
  rows[#rows + 1] = {id, redis.call('HGET', 'tinsmith:pending_queue', id) or '', now - since, tostring(seq),
                     running and 1 or 0, kinds, node and node ~= '' and not holder and 1 or 0,
                     held and 1 or 0}
end
return rows
