#!lua flags=allow-oom
-- Why no call is taken in just now, or ''.
local refusal = no_room(1)
return refusal and refusal.err or ''
