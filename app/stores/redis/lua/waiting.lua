#!lua flags=allow-oom
-- List the kinds of a model's Ops from a seq on, up to a gap. ARGV: model id, seq, most kinds.
local kinds = {}
while #kinds < tonumber(ARGV[3]) do
  local kind = redis.call('HGET', 'tinsmith:op:' .. ARGV[1] .. ':' .. (ARGV[2] + #kinds), 'kind')
  if not kind then break end
  kinds[#kinds + 1] = kind
end
return kinds
