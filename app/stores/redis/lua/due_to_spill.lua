-- List the payloads that should move to the object store: the large ones, and the oldest while over half the budget is
-- used. ARGV: most rows. Returns request ids in the order in which they should move.
local held = tonumber(redis.call('GET', 'tinsmith:payload_bytes') or 0)
local due = {}
local listed = redis.call('ZRANGE', 'tinsmith:spillable', 0, ARGV[1] - 1, 'WITHSCORES')
for i = 1, #listed, 2 do
  if listed[i + 1] ~= '0' and held <= LIMITS.payload_budget / 2 then break end
  due[#due + 1] = listed[i]
  held = held - redis.call('STRLEN', 'tinsmith:payload:' .. listed[i])
end
return due
