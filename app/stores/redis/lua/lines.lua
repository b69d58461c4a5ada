-- Read the progress of models with waiting calls. ARGV: model ids.
-- Returns for each model {owner as JSON, queue, node that owns it or '', applied seq, calls behind that seq, 1 while
-- the next call runs, 1 once the next call has arrived}; {} where no call waits any more.
local rows = {}
for i, model in ipairs(ARGV) do
  local head = redis.call('HMGET', 'tinsmith:models:' .. model, 'owner', 'applied')
  local queue = redis.call('HGET', 'tinsmith:pending_queue', model)
  rows[i] = {}
  if head[1] and queue then
    local holder = redis.call('GET', 'tinsmith:lease:' .. model) or ''
    local op = redis.call('HMGET', 'tinsmith:op:' .. model .. ':' .. (head[2] + 1), 'kind', 'runner')
    rows[i] = {head[1], queue, holder:match('^(.*)/') or '', tonumber(head[2]),
               redis.call('ZCOUNT', 'tinsmith:journal:' .. model, '(' .. head[2], '+inf'),
               op[2] == holder and 1 or 0, op[1] and 1 or 0}
  end
end
return rows
