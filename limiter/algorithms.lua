-- An algorithm is a function
--
--   algorithm(what, clear, rest, n, at, size, period, drip, phase, other, otherStart, entries, otherRest)
--
-- of a level, (clear, rest); a number of units, n; a time, at; the limit's numbers; and
-- for some operations another level that a node reports, with whether that may have
-- begun at another time. entries is what the algorithm's reader has returned, for those that
-- keep entries.
--
--   room      how many units fit next to n others, at the time at; 0 or less if none do
--   add       the level with n units more, which are charged at that time
--   count     the level that counts a denied request next to n units that are held; other is
--             its cost here
--   near      the time of the other level without the delay with which it arrived
--   join      a level that is as high as both levels, after near
--   reported  room in a level that a node reports, next to n units that it has in flight
--
-- It uses no local of a function around it, no upvalue: the server creates it for each
-- call, and each upvalue would cost time. Only the one of logs does, next to whose work on
-- entries they cost little.

--# first
local LEAKY, SLIDING, LOG, WARM, FIXED, BANS = 0, 1, 2, 3, 4, 5

-- Most calls need this one alone. The others, and those that read entries instead of a
-- value, are made once they are requested.
--@ leaky.lua
local others, readers

--# by kind
algorithm = leaky
if kind ~= LEAKY then
  others = others or {}
  if not others[kind] then
    if kind == FIXED then
      --@ window.lua
      others[FIXED] = window
    elseif kind == WARM then
      --@ warm.lua
      others[WARM] = warm
    elseif kind == BANS then
      --@ bans.lua
      others[BANS] = bans
    else
      --@ sliding.lua
      others[SLIDING] = sliding
      if kind == LOG then
        --@ log.lua
        others[LOG], readers = logged, {[LOG] = readLog}
      end
    end
  end
  algorithm = others[kind]
end
