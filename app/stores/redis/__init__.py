"""The journal, the futures and the small records in Redis. Each state change is one Lua script in lua/."""
