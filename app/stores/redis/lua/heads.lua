#!lua flags=allow-oom
-- What waits at these places. ARGV: model id, seq, ... Returns a row for each, as `head_of` makes it; {} where nothing does.
local rows = {}
for i = 1, #ARGV, 2 do rows[#rows + 1] = head_of(ARGV[i], ARGV[i + 1]) or {} end
return rows
