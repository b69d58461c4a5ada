#!lua flags=allow-oom
-- Count what checkpoints took of the store between two measurements, once. ARGV: when the last one was ('' for never),
-- when this one is, JSON list of {project, base model, hour, byte-seconds as text}. Returns 1, or 0 when the last one was
-- another.
if (redis.call('GET', 'tinsmith:storage_measured') or '') ~= ARGV[1] then return 0 end
redis.call('SET', 'tinsmith:storage_measured', ARGV[2])
for _, held in ipairs(cjson.decode(ARGV[3])) do
  redis.call('HINCRBY', page_of('usage', held[1], held[3]), 'storage  ' .. held[2], held[4])
end
return 1
