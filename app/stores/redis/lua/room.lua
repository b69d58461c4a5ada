#!lua flags=allow-oom
-- Returns the reason why no call is admitted now, or ''.
local refusal = no_room(1)
return refusal and refusal.err or ''
