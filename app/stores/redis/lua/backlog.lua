-- Reads of what waits.

-- part: head_of
-- The waiting Op of a model at a seq: {model id, seq, kind, bytes, 1 if it is fresh, owner as JSON}; nil without an Op.
local function head_of(model, seq)
  local request = string.format('%s:%d', model, seq)
  local op = redis.call('HMGET', 'tinsmith:op:' .. request, 'kind', 'doomed', 'attempts', 'runner', 'former')
  if not op[1] then return nil end
  local fresh = not op[2] and tonumber(op[3]) == 0 and not op[4] and (op[5] or '{}') == '{}'
  local size = redis.call('STRLEN', 'tinsmith:payload:' .. request)
  local owner = redis.call('HGET', 'tinsmith:models:' .. model, 'owner') or '""'
  return {model, tonumber(seq), op[1], size, fresh and 1 or 0, owner}
end

-- script: pending
-- needs: now_ms, throttled
-- List all models and sampling requests with unfinished calls: the longest without progress first, throttled ones last.
-- ARGV: rows to skip at the start, most rows, most kinds.
-- Returns rows {id, queue, ms waited, next seq or '', 1 while a worker runs it, kinds of the waiting calls from that
-- seq up to a gap, 1 while a sampling request waits for its node to begin, 1 while it is throttled or paused}; {id, the
-- error} for one that cannot be read, which must not hide the others.
local now, depth = now_ms(), tonumber(ARGV[3])
local function row_of(id, scored)
  local holder = redis.call('GET', 'tinsmith:lease:' .. id)
  local applied = redis.call('HGET', 'tinsmith:models:' .. id, 'applied')
  local seq, running, kinds = '', holder, {'sample'}
  local found = redis.call('HMGET', 'tinsmith:op:' .. id, 'node', 'ring')
  local node, held = found[1], found[2] == 'held' or found[2] == 'paused'
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
  local since = scored - (held and THROTTLED_MS or 0)
  return {id, redis.call('HGET', 'tinsmith:pending_queue', id) or '', now - since, tostring(seq), running and 1 or 0,
          kinds, node and node ~= '' and not holder and 1 or 0, held and 1 or 0}
end
local rows = {}
local waiting = redis.call('ZRANGE', 'tinsmith:pending', ARGV[1], ARGV[1] + ARGV[2] - 1, 'WITHSCORES')
for i = 1, #waiting, 2 do
  local read, found = pcall(row_of, waiting[i], waiting[i + 1])
  rows[#rows + 1] = read and found or {waiting[i], type(found) == 'table' and found.err or found}
end
return rows

-- script: lines
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

-- script: heads flags=allow-oom
-- needs: head_of
-- Read the waiting Ops at these seqs. ARGV: model id, seq, ... Returns a row of `head_of` for each; {} for no Op.
local rows = {}
for i = 1, #ARGV, 2 do rows[#rows + 1] = head_of(ARGV[i], ARGV[i + 1]) or {} end
return rows

-- script: unowned flags=allow-oom
-- needs: head_of, throttled
-- Read the next waiting Op of each model of a queue that no worker owns, the longest without progress first. ARGV:
-- queue, how many entries of `pending` make a page, the page to scan; behind the last page with an entry that is not
-- throttled comes the first again. Returns a row of `head_of` for each.
local function next_of(model)
  local applied = redis.call('HGET', 'tinsmith:models:' .. model, 'applied')
  return applied and head_of(model, applied + 1)
end
local rows, most = {}, tonumber(ARGV[2])
local pages = math.ceil(redis.call('ZCOUNT', 'tinsmith:pending', '-inf', '(' .. THROTTLED_MS) / most)
if pages == 0 then return rows end
local first = ARGV[3] % pages * most
local ids = redis.call('ZRANGE', 'tinsmith:pending', first, first + most - 1)
for i, queue in ipairs(redis.call('HMGET', 'tinsmith:pending_queue', unpack(ids))) do
  if queue == ARGV[1] and redis.call('EXISTS', 'tinsmith:lease:' .. ids[i]) == 0 then
    local read, head = pcall(next_of, ids[i]) -- one that cannot be read must not hide the others
    rows[#rows + 1] = read and head or nil
  end
end
return rows

-- script: waiting flags=allow-oom
-- Read the kinds of a model's Ops from a seq on, up to a gap. ARGV: model id, seq, most kinds. Returns the kinds.
local kinds = {}
while #kinds < tonumber(ARGV[3]) do
  local kind = redis.call('HGET', 'tinsmith:op:' .. ARGV[1] .. ':' .. (ARGV[2] + #kinds), 'kind')
  if not kind then break end
  kinds[#kinds + 1] = kind
end
return kinds
