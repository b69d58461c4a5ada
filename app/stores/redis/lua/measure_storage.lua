#!lua flags=allow-oom
-- Add the storage that checkpoints took between two measurements to the usage pages, once. ARGV: time of the last
-- measurement ('' for none), time of this one, JSON list of {project, base model, hour, byte-seconds as text}.
-- Returns 1, or 0 when another measurement was the last one.
if (redis.call('GET', 'tinsmith:storage_measured') or '') ~= ARGV[1] then return 0 end
redis.call('SET', 'tinsmith:storage_measured', ARGV[2])
for _, held in ipairs(cjson.decode(ARGV[3])) do
  redis.call('HINCRBY', page_of('usage', held[1], held[3]), 'storage  ' .. held[2], held[4])
end
return 1
