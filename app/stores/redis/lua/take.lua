-- Charge a call that is not journalled. ARGV: charge. Returns {}, or the refusal of `over_limit` in limits.lua.
return take(cjson.decode(ARGV[1])) or {}
