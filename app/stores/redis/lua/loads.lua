#!lua flags=allow-oom
-- List the seqs in a model's journal whose Ops read a checkpoint when they run or are replayed. ARGV: model id.
local found = {}
for _, seq in ipairs(redis.call('ZRANGE', 'tinsmith:journal:' .. ARGV[1], 0, -1)) do
  local kind = redis.call('HGET', 'tinsmith:op:' .. ARGV[1] .. ':' .. seq, 'kind')
  if kind == 'create_model' or kind == 'load_weights' then found[#found + 1] = seq end
end
return found
