-- Charge a call that is not journalled. ARGV: charge. Returns {}, or why it is not let in (`over_limit` in prelude.lua).
return take(cjson.decode(ARGV[1])) or {}
