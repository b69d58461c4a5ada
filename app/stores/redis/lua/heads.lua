#!lua flags=allow-oom
-- Read the waiting Ops at these seqs. ARGV: model id, seq, ... Returns a row of `head_of` for each; {} for no Op.
local rows = {}
for i = 1, #ARGV, 2 do rows[#rows + 1] = head_of(ARGV[i], ARGV[i + 1]) or {} end
return rows
