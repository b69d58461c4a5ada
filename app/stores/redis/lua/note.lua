#!lua flags=allow-oom
-- Write an entry to this hour's page of a project's book; an existing entry stays. ARGV: book, project, entry id, text,
-- 'urgent' for an entry that is written even without room. The stored value is the time in ms, a space and the text.
-- Returns 1, or 0 when the entry exists.
local refusal = ARGV[5] ~= 'urgent' and no_room(0)
if refusal then return refusal end
local page = page_of(ARGV[1], ARGV[2], hour_now())
return redis.call('HSETNX', page, ARGV[3], string.format('%.0f ', now_ms()) .. ARGV[4])
