-- Decides requests against their limits. Each call of the script is one atomic step. This
-- file knows groups, stored values, units that are held and levels that nodes report, but
-- no algorithm: each of those is a function in a file of its own, which is inserted where
-- a line "--@ file" stands. A node is a process that calls the script; the server is the
-- Redis that runs it.
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
--            5 doubles size, period, drip, phase and cost: what the first four mean is up
--                      to the algorithm
--          if levels are reported
--            2 doubles the level that the node knows, which the server may have lost: its
--                      time from now on, and its rest
--            1 double  how many units the node has in flight beside it, for which there
--                      must be room too
--            1 byte    1 if drips may come at other times here than in that level: the
--                      node found the bucket empty, or another server may have begun anew;
--                      2 if there is no such level, and the units take room beside what is
--                      stored here: the node has admitted them and not reported yet
--          with the flag HOLDS, except to look and to empty
--            2 doubles the process and the number of the node's tab, see held.lua
--          to SETTLE and RENEW after that
--            3 doubles the tab's receipt, and how many units its requests have let go and
--                      been charged, in total
--          to RENEW after that
--            3 doubles the number of the tab that it replaces; its receipt; and how many
--                      units its requests have been charged
--          to LEASE
--            2 doubles how many units may be leased before there is room for them, and how
--                      many are leased at least, or none
--   reply  nothing to REMOVE. To all else, for each bucket
--            t         the time until it is empty, or -1 - t if its key held something
--                      that is not a bucket
--            r         the rest of its level, or -1 - r if it has no room, or
--                      -1 - BLOCKED - r if only units that are held or in flight take it
--          with the flag HOLDS, and to PEEK and RESET, two more
--            units     how many are held
--            receipt   of the tab if units of the request are held, otherwise 0; to SETTLE
--                      and RENEW 1 if the tab was there, or the replaced one, otherwise 0;
--                      or -1 if the call is late, so that nothing was done for the group
--          and to LEASE instead
--            units     how many are leased
--            0
--          After those of a whole group, four for each of its buckets that keep entries,
--          see log.lua.
--
-- An error of the server ends the call, without a reply: what was written before stays.
-- Nodes never repeat a decision that may have been made. They take their requests as charged,
-- and report the levels that follow from that with their next ones. That is how a lost
-- reply is made good. Only SETTLE and RENEW are repeated until they are answered, since that
-- changes nothing, see held.lua. Nothing is stored of a node besides what it holds: that
-- of one that has crashed lapses, and all else drips out.

-- The operations. The first two decide a request. Only those before PROBE join the levels that
-- nodes tell to what they find, and they store what they answer: a node takes it for known.
local ALL = 0    -- charge all buckets if all have room, otherwise none
local EACH = 1   -- charge each bucket that has room
local SETTLE = 2 -- let go held units, and charge others instead, unless they have lapsed; see held.lua
local RENEW = 3  -- hold units, the cost, and no others of this node, also if the server has lost them
local LEASE = 4  -- charge a share of the room to a node, which uses it later: the cost at most
local REPORT = 5 -- charge what a node has admitted by itself, whether there is room for it or not
local PROBE = 6  -- see whether the server accepts writes: write the key back unchanged; the time in the reply is 0 if it has no value
local REMOVE = 7 -- remove buckets that a node has evicted, unless they hold more than the level that it reports
local PEEK = 8   -- only look at the buckets
local RESET = 9  -- empty the buckets; the reply is what they held

-- The flags of a bucket.
local COUNTS = 1   -- count denied requests: charge them if there is room, otherwise as the algorithm says
local DRY = 2      -- a dry run: decide as always, but never deny the request
local ELASTIC = 4  -- no room is no denial: it borrows from a pool or, with WATCHES, is one, see below
local HOLDS = 8    -- where ALL or EACH would charge an admitted request, hold its units, since its outcome is not known yet
local WATCHES = 16 -- times n: it watches the n buckets before it. It is charged only if one of them denies the request, and not because of units that are held; while it has no room, they have none either

-- A bucket that borrows leaves to the next pool of the group what it has no room for. The
-- pool is charged if the request is admitted and one of those before it, up to another
-- pool, had no room; if there is none in the pool either, that denies the request.

-- The part of the room that is leased at a time, so that idle nodes leave room to others.
local LEASED = 4

-- A level is two numbers: a time, at which nothing is left of it, and a rest, which only
-- its algorithm understands, and which is less than the bucket's drip. The value of a key
-- is one of these. Its first field is 8 plus the algorithm; written is when it was written:
--
--   12 bytes  4 bits; 52 bits, the time; 40 bits, the time less written. The rest is 0
--   25 bytes  1 byte; doubles, the time, the rest, written
--   more      the same, and 7 doubles for each tab of its held units, see held.lua
--   0 bytes   removed: the key expires at once. GET and SET are the only commands for
--             values, so that a user of the server needs no others
--
-- A value that was written later than now was written before the clock was set back:
-- the bucket holds what it held then, and its drips or windows are moved by as much
-- until it is empty. (A clock that is set back by less than the time since it was written
-- only makes the bucket drip later.) A key expires when its bucket is empty, never before.
--
-- An algorithm is
--
--   algorithm(what, clear, rest, n, at, size, period, drip, phase, other, otherStart, entries, otherRest)
--
-- of a level, (clear, rest); a number of units, n; a time, at; the limit's numbers; and
-- for some operations another level that a node reports, with whether that may have
-- begun at another time. entries is what the algorithm's reader has returned, for those that
-- keep entries.
--
--   room    how many units fit beside n others, at the time at; 0 or less if none do
--   add     the level with n units more, which are charged at that time
--   count   the level that counts a denied request beside n units that are held; other is
--           its cost here
--   near    the time of the other level without the delay with which it arrived
--   join    a level that is as high as both levels, after near
--   beside  room, in a level that a node reports, beside n units that it has in flight
--
-- It uses no local of a function around it, no upvalue: the server makes it anew for each
-- call, and each upvalue would cost time. Only that of logs does, next to whose work on
-- entries they cost little.

local fields = table.unpack or unpack -- as this Lua has it
local call, tryCall, read, pack = redis.call, redis.pcall, struct.unpack, struct.pack
local floor, max, min = math.floor, math.max, math.min
local keys, runs = KEYS, ARGV

local HORIZON = 2 ^ 50 -- no level is further ahead, some 35 years
local BLOCKED = HORIZON -- see the reply: more than any rest
local LEAKY, SLIDING, LOG, WARM, FIXED, BANS = 0, 1, 2, 3, 4, 5

if #runs == 0 then
  return {} -- the caller only checks whether the script exists
end

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

--@ leaky.lua

-- Made once they are needed, as most calls need none of them: the other algorithms; those
-- that read entries, instead of a value; the functions of held.lua.
local others, readers, holds

local reply, replies, key = {}, 0, 0
for r = 1, #runs do
  local run = runs[r]
  local groups, buckets, what, reports, offset = read('>HHBB', run)
  local several = buckets > 1
  local row, rows = nil, several and {}
  local algorithm, kind, flags, size, period, drip, phase, cost
  local told, toldRest, inFlight, toldStart, ahead, charges
  local tab -- what is asked of one, see held.lua
  for i = 1, buckets do
    kind, flags, size, period, drip, phase, cost, offset = read('>BBddddd', run, offset)
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
    if reports == 1 then
      told, toldRest, inFlight, toldStart, offset = read('>dddB', run, offset)
      told = now + told
    end
    tab = false
    if what == LEASE then
      ahead, charges, offset = read('>dd', run, offset)
    elseif what <= RENEW and flags % WATCHES >= HOLDS then
      tab = {read(what <= EACH and '>dd' or what == SETTLE and '>ddddd' or '>dddddddd', run, offset)}
      offset = tab[#tab]
    end
    if several then
      -- What is asked, and room for what is found in each group.
      rows[i] = {
        algorithm, kind, flags, size, period, drip, phase, cost, told, toldRest, inFlight, toldStart, ahead, charges,
        0, 0, 0, false, false, false, false, false, false, 0, tab
      }
    end
  end

  for _ = 1, groups do
    -- First the level of each bucket, and whether the request fits.
    local admitted = true -- if all buckets have room that deny without
    local late = false -- whether a later call of the node has counted what it holds
    local short = false -- whether a bucket lacks room for which the next pool may make up
    local clear, rest -- the level
    local held, record -- how many units are held, and their record, if there is one
    local fits -- whether there is room or, to SETTLE and RENEW, whether the tab was there
    local blocked -- whether there is none only because of units that are held or in flight
    local changed -- whether the key has to be written
    local foreign -- whether it has something that is not a bucket
    local entries -- of an algorithm that keeps them
    local due -- how many units to charge: those that a pool lends, or of a lease
    for i = 1, buckets do
      if several then
        row = rows[i]
        algorithm, kind, flags, size, period, drip, phase, cost, told, toldRest, inFlight, toldStart, ahead, charges = fields(row, 1, 14)
        tab = row[25]
      end
      clear, rest, held, record, fits, blocked, changed, foreign, entries, due = 0, 0, 0, false, false, false, false, false, false, 0

      -- What is stored. A value that is not a bucket counts as an empty one; the next
      -- charge replaces it.
      local value
      if readers and readers[kind] then
        entries, clear, rest, changed, foreign, record = readers[kind](keys[key + i], period, phase)
        if entries.err then
          return entries
        end
      else
        value = tryCall('GET', keys[key + i])
      end
      if type(value) == 'string' then
        local first, c, s, written = 0, 0, 0, 0
        if #value == 12 then
          local high, low, ahead, low2 = read('>I3I4I4B', value)
          first = floor(high / 1048576)
          c = high % 1048576 * 4294967296 + low
          written = c - ahead * 256 - low2
        elseif #value == 25 then
          first, c, s, written = read('>Bddd', value)
        elseif #value > 25 and (#value - 25) % 56 == 0 then
          first, c, s, written = read('>Bddd', value)
          record = value
        end
        -- A level is at most HORIZON ahead when it is written, and held units that lapse
        -- can add as much.
        if first ~= kind + 8 or not (c - written <= 2 * HORIZON and s >= 0 and s < drip and c % 1 + s % 1 + written % 1 == 0) then
          record, foreign = false, value ~= ''
        else
          clear, rest = c, s
          if written > now then -- the clock was set back
            clear, changed = now + c - written, true
          end
        end
      elseif value then
        if not string.find(value.err, '^WRONGTYPE') then
          return value
        end
        foreign = true
      end
      if not holds and (record or flags % WATCHES >= HOLDS) then
        --@ held.lua
      end
      if record then -- the text that has it
        record = holds.parse(record, type(value) == 'string' and 26 or 1)
        if not record then
          clear, rest, foreign = 0, 0, true
        end
      end
      if record then
        local wasSetBack
        clear, rest, held, wasSetBack = holds.present(record, algorithm, clear, rest, size, period, drip, phase, entries)
        changed = changed or wasSetBack
      end
      if clear > now then
        clear = min(clear, now + HORIZON)
      else
        clear, rest = now, 0
      end

      -- What a node reports.
      local near
      local taken = held -- units that take room beside the level
      if reports == 1 and toldStart == 2 then
        taken = held + inFlight
      elseif reports == 1 and what < PROBE then
        local c, s = clear, rest
        near = told > now and algorithm('near', c, s, 0, now, size, period, drip, phase, told, toldStart, entries) or now
        if near > now then
          clear, rest = algorithm('join', c, s, 0, now, size, period, drip, phase, near, toldStart, entries, toldRest)
          changed = changed or clear ~= c or rest ~= s
        end
      end

      if what <= EACH then
        late = late or tab and record and holds.isLate(record, tab)
        fits = algorithm('room', clear, rest, 0, now, size, period, drip, phase, 0, 0, entries) >= cost
        if fits and taken > 0 then
          fits = algorithm('room', clear, rest, taken, now, size, period, drip, phase, 0, 0, entries) >= cost
          blocked = not fits
        end
        if fits and near then
          fits = algorithm('beside', near, toldRest, inFlight, now, size, period, drip, phase, 0, 0, entries) >= cost + held
          blocked = not fits
        end
        if flags < ELASTIC or flags % HOLDS < ELASTIC then
          admitted = admitted and (fits or flags % ELASTIC >= DRY)
          if not fits and flags >= WATCHES then
            for j = several and i - floor(flags / WATCHES) or i, i - 1 do
              rows[j][19] = false
            end
          end
        elseif flags < WATCHES then
          short = short or not fits
        else -- a pool
          admitted = admitted and (fits or not short or flags % ELASTIC >= DRY)
          due, short = short and cost or 0, false
        end
      elseif what == SETTLE then
        fits, tab.gone, tab.charge = holds.settle(record, tab)
        held, changed = record and holds.held(record) or 0, changed or fits
      elseif what == RENEW then
        late = holds.isLate(record, tab)
        if late then
          tab.gone, tab.charge = 0, 0
        else
          record, fits, tab.gone, tab.charge = holds.renew(record, tab, cost)
          held, changed = holds.held(record), true
        end
      elseif what == LEASE then
        local most = size + ahead
        local room = algorithm('room', clear, rest, taken, now, most, period, drip, phase, 0, 0, entries)
        if near then
          room = min(room, algorithm('beside', near, toldRest, inFlight, now, most, period, drip, phase, 0, 0, entries) - held)
        end
        due = min(cost, floor(room / LEASED))
        if due < charges then
          due = 0 -- a request would do as well
        end
      elseif what == PROBE then -- which does not know the bucket's numbers
        changed = false
        if type(value) == 'string' then
          call('SET', keys[key + i], value, 'KEEPTTL')
          clear, foreign = clear > now and clear or now + 1, false
        end
      elseif what == REMOVE then -- if the stored level would add nothing to the reported one
        changed = false
        if clear > now and not record then
          local c = algorithm('near', told, toldRest, 0, now, size, period, drip, phase, clear, 0)
          local c2, s2 = algorithm('join', told, toldRest, 0, now, size, period, drip, phase, c, 0, false, rest)
          changed = c2 == told and s2 == toldRest
        end
      elseif what == RESET then
        changed = (value or entries) and true
      end
      if several then
        row[15], row[16], row[17], row[18], row[19], row[20], row[21], row[22], row[23], row[24] =
          clear, rest, held, record, fits, blocked, changed, foreign, entries, due
      end
    end

    -- Then the charges, and the replies.
    local more -- what is replied after the others' numbers
    for i = 1, buckets do
      if several then
        algorithm, kind, flags, size, period, drip, phase, cost, told, toldRest, inFlight, toldStart, ahead, charges,
          clear, rest, held, record, fits, blocked, changed, foreign, entries, due, tab = fields(rows[i], 1, 25)
      end
      local charge, receipt = 0, 0
      if what > EACH then
        if what == SETTLE or what == RENEW then
          charge, receipt = tab.charge, fits and 1 or 0
          if charge > tab.gone then -- a debt of size at most
            charge = min(charge, max(tab.gone, size + algorithm('room', clear, rest, 0, now, size, period, drip, phase, 0, 0, entries)))
          end
        elseif what == LEASE then
          charge = due
        elseif what == REPORT then
          charge = cost
        end
      elseif late then
        charge = 0
      elseif flags >= WATCHES then
        if flags % HOLDS >= ELASTIC then -- a pool
          charge = fits and admitted and due or 0
          if charge > 0 and flags % WATCHES >= HOLDS then
            record, receipt = holds.hold(record, tab, cost)
            held, changed, charge = held + cost, true, 0
          end
        else
          for j = several and i - floor(flags / WATCHES) or i, i - 1 do
            if fits and not rows[j][19] and not rows[j][20] then
              charge = cost
            end
          end
        end
      elseif fits and admitted and flags >= HOLDS then
        record, receipt = holds.hold(record, tab, cost)
        held, changed = held + cost, true
      elseif fits and (admitted or what == EACH and flags < HOLDS or flags % 2 == COUNTS) then
        charge = cost
      elseif not fits and flags % 2 == COUNTS then
        local c, s = clear, rest
        clear, rest = algorithm('count', c, s, held, now, size, period, drip, phase, cost, 0, entries)
        changed = changed or clear ~= c or rest ~= s or entries
      end
      if charge > 0 then
        clear, rest = algorithm('add', clear, rest, charge, now, size, period, drip, phase, 0, 0, entries)
        clear, changed = min(clear, now + HORIZON), true
      end
      if changed and what < PROBE then
        if entries then
          entries.write(entries, clear, rest, record and record[1] and record, period)
        else
          local ahead, last, stored = clear - now, clear, nil
          if record and record[1] then
            last = holds.lapses(record)
            last = max(last, algorithm('add', clear, rest, held, last, size, period, drip, phase))
            last = min(last, now + 2 * HORIZON)
            stored = pack('>Bddd', kind + 8, clear, rest, now) .. holds.text(record)
          elseif rest > 0 or ahead >= 1099511627776 then
            stored = pack('>Bddd', kind + 8, clear, rest, now)
          else
            local low, low2 = clear % 4294967296, ahead % 256
            stored = pack('>I3I4I4B', (kind + 8) * 1048576 + (clear - low) / 4294967296, low, (ahead - low2) / 256, low2)
          end
          -- In milliseconds from now, as not all servers take a time: at most one more
          -- than the bucket takes to be empty, and never less.
          local expires = last - now
          expires = (expires - expires % 1000) / 1000 + 1
          if expires < 1 then
            expires = 1 -- the bucket is empty already
          elseif expires < 4e9 then -- which %u can print, in less time than a number takes
            expires = string.format('%u', expires)
          end
          call('SET', keys[key + i], stored, 'PX', expires)
        end
      end
      local taken = blocked and held + (reports == 1 and inFlight or 0) or 0
      if taken > 0 then -- tell the level as if they were charged
        clear, rest = algorithm('add', clear, rest, taken, now, size, period, drip, phase)
        clear = min(clear, now + HORIZON)
      end
      if what ~= REMOVE then
        reply[replies + 1] = foreign and now - clear - 1 or clear - now
        reply[replies + 2] = (fits or what > EACH) and rest or -1 - rest - (blocked and BLOCKED or 0)
        replies = replies + 2
        if what == LEASE then
          reply[replies + 1], reply[replies + 2] = charge, 0
          replies = replies + 2
        elseif flags % WATCHES >= HOLDS or what >= PEEK then
          reply[replies + 1], reply[replies + 2] = held, late and -1 or receipt
          replies = replies + 2
        end
        if entries then
          local beside = blocked and taken or (what <= EACH and fits and flags % WATCHES >= HOLDS or what >= PEEK) and held or 0
          more = more or {}
          for _, n in ipairs({entries.tell(entries, size, cost, beside, taken, period)}) do
            more[#more + 1] = n
          end
        end
      end
      if changed and what == RESET then -- not earlier: what is told of entries may be read from the key
        call('SET', keys[key + i], '', 'PX', 1)
      elseif changed and what == REMOVE then -- nobody waits for it, so an error must not end the call
        tryCall('SET', keys[key + i], '', 'PX', 1)
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
