#!lua flags=allow-oom
-- What waits at these places. ARGV: model id, seq, ... Returns rows {index of the pair, kind, bytes, 1 if it is fresh}.
local rows = {}
for i = 1, #ARGV, 2 do
  local request = ARGV[i] .. ':' .. ARGV[i + 1]
  local op = redis.call('HMGET', 'tinsmith:op:' .. request, 'kind', 'doomed', 'attempts', 'runner')
  if op[1] then
    local fresh = not op[2] and tonumber(op[3]) == 0 and not op[4]
    rows[#rows + 1] = {(i - 1) / 2, op[1], redis.call('STRLEN', 'tinsmith:payload:' .. request), fresh and 1 or 0}
  end
end
return rows
