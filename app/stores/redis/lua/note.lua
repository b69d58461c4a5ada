#!lua flags=allow-oom
-- Write an entry on this hour's page of a project's book; one that is there stays. ARGV: book, project, its id, its text,
-- 'urgent' for one that is written whether there is room or not. What is stored is its time in ms, a space and the text.
-- Returns 1, or 0 when it is there.
local refusal = ARGV[5] ~= 'urgent' and no_room(0)
if refusal then return refusal end
local page = page_of(ARGV[1], ARGV[2], hour_now())
return redis.call('HSETNX', page, ARGV[3], string.format('%.0f ', now_ms()) .. ARGV[4])
