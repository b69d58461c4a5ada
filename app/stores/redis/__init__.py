"""The journal, the futures and the small records in Redis. Every state change is one Lua script in lua/."""
