-- Decides requests against their limits. Each call of the script is one atomic step. A node
-- is a process that calls the script; the server is the Redis that runs it.
--
-- This file reads calls and writes replies. In place of a line "--@ file", that file is
-- inserted; "--@ file: part" is what it has between a line "--# part" and the next such one.
-- These are no functions, as a function is made again in each call, and what it uses of those
-- around it costs time.
--
--   decide      the operations that decide a request
--   upkeep      all others
--   value       what is stored of a bucket
--   held        units that are held for requests whose outcome is not known yet
--   algorithms  how buckets fill and drip: nothing else names an algorithm
--   row         what is known of each bucket of several
--
-- The buckets of one request form a group. A call carries one or more groups,
-- which are decided one after the other. Every number is an integer below 2^53, up
-- to which doubles are exact; times are in microseconds.
--
--   KEYS   the buckets' keys, group after group; none is twice in a group
--   ARGV   one argument for each run of equal groups, which describes such a group.
--          It is packed, because each argument costs the server as much as the work
--          on it: 2 bytes, the number of groups; 2 bytes, the number of buckets in
--          each; 1 byte, the operation; 1 byte, whether nodes report levels; then for
--          each bucket
--            1 byte    its algorithm
--            1 byte    the sum of its flags
--            1 byte    its role
--            5 doubles size, period, drip, phase and cost: what the first four mean is up
--                      to the algorithm
--          if levels are reported
--            2 doubles the level that the node knows, which the server may have lost: its
--                      time from now on, and its rest
--            1 double  how many units the node has in flight next to it, for which there
--                      must be room too; with HOLDS also what its accounts here hold
--            1 byte    1 if drips may come at other times here than in that level: the
--                      node found the bucket empty, or another server may have begun again;
--                      2 if there is no such level, and the units take room in addition to what is
--                      stored here: the node has admitted them and not reported yet
--          with the flag HOLDS, except to look and to empty
--            2 doubles the process and the number of the node's account, see held.lua
--          to SETTLE and RENEW after that
--            4 doubles the account's receipt; how many units its requests have released and been
--                      charged, in total; and how many of those that are charged, to RENEW of the
--                      account that it replaces, are in the level that the node knows
--          to RENEW after that
--            3 doubles the number of the account that it replaces; its receipt; and how many
--                      units its requests have been charged
--          to LEASE
--            2 doubles how many units may be leased before there is room for them, and how
--                      many are leased at least, or none
--   reply  nothing to REMOVE. To all else, for each bucket
--            t         the time until it is empty, or -1 - t if its key held something
--                      that is not a bucket
--            r         the rest of its level, or -1 - r if it has no room, or
--                      -1 - BLOCKED - r if only units that are held or in flight take it
--          with the flag HOLDS, and to PEEK, RESET and CLEAR, two more
--            units     how many are held
--            receipt   of the account if units of the request are held, otherwise 0; to SETTLE
--                      and RENEW 1 if the account was there, or the replaced one, otherwise 0;
--                      or -1 if the call is late, so that nothing was done: to ALL and EACH
--                      for the whole group
--          and to LEASE instead
--            units     how many are leased
--            0
--          After the numbers of a whole group, four for each of its buckets that keep entries,
--          see log.lua.
--
-- An error of the server ends the call, without a reply: what was written before stays.
-- Nodes never repeat a decision that may have been made. They take their requests as charged,
-- and report the levels that follow from that with their next ones. That is how a lost
-- reply is made good. Only SETTLE and RENEW are repeated until they are answered, since that
-- changes nothing, see held.lua. Nothing is stored of a node besides what it holds: that
-- of one that has crashed lapses, and all else drips out.

-- The operations. decide.lua has the first two, upkeep.lua the others. Only those before PROBE
-- join the levels that nodes report to what they find, and they store what they answer: a node
-- takes it for known.
local ALL = 0    -- charge all buckets if all have room, otherwise none
local EACH = 1   -- charge each bucket that has room
local SETTLE = 2 -- release held units, and charge others instead, unless they have lapsed; see held.lua. Without HOLDS, charge the cost
local RENEW = 3  -- hold units, the cost, and no others of this node, also if the server has lost them
local LEASE = 4  -- charge a share of the room to a node, which uses it later: the cost at most
local REPORT = 5 -- charge what a node has admitted on its own, whether there is room for it or not
local PROBE = 6  -- see whether the server accepts writes: write the key back unchanged; the time in the reply is 0 if it has no value
local REMOVE = 7 -- remove buckets that a node has evicted, unless they hold more than the level that it reports
local PEEK = 8   -- only look at the buckets
local RESET = 9  -- empty the buckets; the reply is what they held
local CLEAR = 10 -- empty them, except for what is held, which the reply has

-- The flags of a bucket.
local COUNTS = 1 -- count denied requests: charge them if there is room, otherwise as the algorithm says
local DRY = 2    -- a dry run: decide as always, but never deny the request
local HOLDS = 4  -- where ALL or EACH would charge an admitted request, hold its units, since its outcome is not known yet; a request that costs nothing only reads what is held

--@ decide.lua: roles

local fields = table.unpack or unpack -- as this Lua has it
local call, tryCall, read, pack = redis.call, redis.pcall, struct.unpack, struct.pack
local floor, max, min = math.floor, math.max, math.min
local keys, runs = KEYS, ARGV

local HORIZON = 2 ^ 50 -- no level is further ahead, some 35 years
local BLOCKED = HORIZON -- see the reply: more than any rest

if #runs == 0 then
  return {} -- the caller only checks whether the script exists
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

--@ algorithms.lua: first
local holds -- the functions of held.lua, made once they are needed

local reply, replies, key = {}, 0, 0
for r = 1, #runs do
  local run = runs[r]
  local groups, buckets, what, reports, offset = read('>HHBB', run)
  local several = buckets > 1
  --@ row.lua: arguments
  for i = 1, buckets do
    local flags
    kind, flags, role, size, period, drip, phase, cost, offset = read('>BBBddddd', run, offset)
    --@ algorithms.lua: by kind
    if reports == 1 then
      reported, reportedRest, inFlight, reportedStart, offset = read('>dddB', run, offset)
      reported = now + reported
    end
    counts, dry, account = false, false, false
    if what == LEASE then
      ahead, least, offset = read('>dd', run, offset)
    elseif flags > 0 then
      counts, dry = flags % DRY >= COUNTS, flags % HOLDS >= DRY
      if flags >= HOLDS and what <= RENEW then
        account = {read(what <= EACH and '>dd' or what == SETTLE and '>dddddd' or '>ddddddddd', run, offset)}
        offset = account[#account]
      end
    end
    --@ row.lua: new
  end

  for _ = 1, groups do
    --@ row.lua: what is found
    local more -- what is replied after the others' numbers
    if what <= EACH then
      --@ decide.lua: fits
    end
    for i = 1, buckets do
      if what <= EACH then
        --@ decide.lua: charge
      else
        --@ upkeep.lua
      end
      if charge > 0 then
        clear, rest = algorithm('add', clear, rest, charge, now, size, period, drip, phase, 0, 0, entries)
        clear, changed = min(clear, now + HORIZON), true
      end
      if changed then
        --@ value.lua: write
      end

      local taken = 0 -- by units because of which there is no room: they are reported as if they were charged
      if blocked then
        taken = held
        if reports == 1 and account and reportedStart < 2 then -- those in flight, except for what this node's account has of them
          taken = taken + holds.missing(record, account, inFlight)
        elseif reports == 1 then
          taken = taken + inFlight
        end
      end
      if taken > 0 then
        clear, rest = algorithm('add', clear, rest, taken, now, size, period, drip, phase)
        clear = min(clear, now + HORIZON)
      end
      if what ~= REMOVE then
        reply[replies + 1] = foreign and now - clear - 1 or clear - now
        reply[replies + 2] = fits and rest or -1 - rest - (blocked and BLOCKED or 0)
        replies = replies + 2
        if account or what == LEASE or what >= PEEK then
          reply[replies + 1], reply[replies + 2] = what == LEASE and charge or held, receipt
          replies = replies + 2
        end
        if entries then
          local reserved = blocked and taken or (account and what <= EACH and fits or what >= PEEK) and held or 0
          more = more or {}
          for _, n in ipairs({entries.describe(entries, size, cost, reserved, taken, period)}) do
            more[#more + 1] = n
          end
        end
      end
      if resets then -- not earlier: what is reported of entries may be read from the key
        call('SET', keys[key + i], '', 'PX', 1)
      end
    end
    if more then
      for i = 1, #more do
        replies = replies + 1
        reply[replies] = more[i]
      end
    end
    key = key + buckets
  end
end
if math.type then -- this Lua has integers too, and replies others as text
  for i = 1, replies do
    reply[i] = floor(reply[i])
  end
end
return reply
