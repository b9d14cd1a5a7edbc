-- A sliding log keeps each admission for the time of one window, which is its drip
-- rate: a time and some units. A key holds a string: the byte 76; as doubles the
-- time and the slack of its summary, and the sum of all units; and for each entry,
-- oldest first, a double and 2 bytes. If units are held, the byte is 72, and before
-- the entries there are two more doubles: how many, and until when. The key expires
-- when the newest entry has left the window.
--
-- The summary counts the same units in windows that begin at multiples of their
-- length, and is that of a sliding window, see sliding.lua. It is what nodes know
-- of a log, and what they tell. log.go says how they decide by it.
--
-- Reading the log takes a step for each entry that has left the window, and one for
-- each that has to leave before there is room again. The newest entry is kept
-- apart, because the next charge may be of the same microsecond.

local pack = struct.pack
local KIND, KIND_HOLDS = 76, 72
local ENTRY = 10           -- bytes of an entry
local MOST = 65535         -- units that an entry can have
local FULL = 10000         -- units that fill any log
local COUNT = 2 ^ 24       -- more than a window counts
local max = math.max

-- header returns the time and the slack of the summary, the sum of the units, what
-- is held and until when, and the index of the first entry; or nothing if value is
-- no log.
local function header(value)
  local kind, size = byte(value), #value
  local clear, slack, total, held, till, from, _ = 0, 0, 0, 1, 1, 0, 0
  if kind == KIND and size >= 25 and (size - 25) % ENTRY == 0 then
    _, clear, slack, total, from = unpack('>Bddd', value)
  elseif kind == KIND_HOLDS and size >= 41 and (size - 41) % ENTRY == 0 then
    _, clear, slack, total, held, till, from = unpack('>Bddddd', value)
  end
  if clear > 0 and clear < 2 ^ 53 and slack >= 0 and slack < COUNT * COUNT and slack % 1 == 0
    and total >= 0 and held > 0 and held <= HORIZON and till > 0 and till < 2 ^ 53 then
    if kind == KIND then
      held, till = 0, 0
    end
    return clear, slack, total, held, till, from
  end
end

-- append adds an entry that is not older than the newest.
local function append(log, at, units)
  if log.newest == at and log.units + units <= MOST then
    log.units = log.units + units
  else
    if log.newest then
      log.text = sub(log.text, 1, log.upto - 1) .. pack('>dH', log.newest, log.units)
      log.upto = log.upto + ENTRY
    end
    log.newest, log.units = at, units
  end
  log.total = log.total + units
end

-- insert adds an entry that may be older than others.
local function insert(log, at, units)
  if not log.newest or at >= log.newest then
    return append(log, at, units)
  end
  local low, high = 0, (log.upto - log.from) / ENTRY
  while low < high do
    local middle = floor((low + high) / 2)
    if unpack('>d', log.text, log.from + middle * ENTRY) <= at then
      low = middle + 1
    else
      high = middle
    end
  end
  local to = log.from + low * ENTRY
  log.text = sub(log.text, 1, to - 1) .. pack('>dH', at, units) .. sub(log.text, to, log.upto - 1)
  log.upto = log.upto + ENTRY
  log.total = log.total + units
end

-- summarize returns the summary of a log's entries. It is only used after the clock
-- was set back.
local function summarize(log, rate, phase)
  local clear = log.newest - (log.newest - phase) % rate + 2 * rate
  local last, before, from = log.units, 0, log.upto
  while from > log.from do
    from = from - ENTRY
    local at, units = unpack('>dH', log.text, from)
    if at >= clear - 2 * rate then
      last = last + units
    elseif at >= clear - 3 * rate then
      before = before + units
    else
      break
    end
  end
  return clear, min(before, COUNT - 1) * COUNT + min(last, COUNT - 1)
end

-- wait returns the time until so many units have left the window.
local function wait(log, units, rate)
  if units <= 0 then
    return 0
  end
  local at, from, n = log.newest, log.from, 0
  while units > 0 and from < log.upto do
    at, n, from = unpack('>dH', log.text, from)
    units = units - n
  end
  if units > 0 and log.newest then
    at, units = log.newest, units - log.units
  end
  local ahead = units <= 0 and at + rate - now or rate -- the rest is held
  return ahead > 0 and ahead < rate and ahead or rate
end

return {
  -- Reads a log: what it holds, its summary, whether that differs from what is
  -- stored, whether value is something else, and what is held until when. Entries
  -- of the future, if the clock was set back, count as of now.
  open = function(value, rate, phase)
    local log = {text = value, from = 1, upto = 1, total = 0}
    if not value then
      log.text = ''
      return log, now, 0, false, false, 0, 0
    end
    local clear, slack, total, held, till, from = header(value)
    if not clear then
      return log, now, 0, false, true, 0, 0
    end
    local upto, edge, changed = from, now - rate, false
    if from <= #value then
      upto = #value + 1 - ENTRY
      log.newest, log.units = unpack('>dH', value, upto)
      local at, units, after = 0, 0, from
      while after < upto do
        at, units, after = unpack('>dH', value, after)
        if not (at <= edge) then
          break
        end
        from, total = after, total - units
      end
      if from == upto and log.newest <= edge then
        total, log.newest = total - log.units, nil
      end
    end
    local newest = log.newest
    if newest and not (newest > edge and newest < 2 ^ 53 and total >= log.units and total <= MOST * (1 + (upto - from) / ENTRY)) or not newest and total ~= 0 then
      log.newest = nil
      return log, now, 0, false, true, 0, 0
    end
    log.from, log.upto, log.total = from, upto, total
    if newest and (newest > now or clear - now > 2 * rate or clear <= now) then
      -- The clock was set back, or a node has told of an entry in a window that ended
      -- later for it.
      local units = log.units
      while newest > now and log.upto > from do
        local at, more = unpack('>dH', value, log.upto - ENTRY)
        if at <= now then
          break
        end
        units, log.upto = units + more, log.upto - ENTRY
      end
      log.newest, log.units = min(newest, now), min(units, MOST)
      log.total, changed = total - units + log.units, true
      clear, slack = summarize(log, rate, phase)
    end
    if not log.newest then
      clear, slack = 0, 0
    end
    if held > 0 and till > now + HELD_FOR then
      till, changed = now + HELD_FOR, true
    end
    if held > 0 and till <= now then
      -- They were not settled in time. They count as of then.
      local at = max(till, log.newest or 0)
      if at > edge then
        clear, slack = sliding.started(clear, slack, at, rate, phase)
        clear, slack = sliding.add(clear, slack, held)
        append(log, at, min(held, FULL))
      end
      held, changed = 0, true
    end
    if not log.newest then
      clear, slack = now, 0
    end
    return log, clear, slack, changed, false, held, till
  end,

  -- How many units it has room for, negative if it holds more than its size.
  room = function(_, _, size, _, log)
    return size - log.total
  end,

  -- The same beside what a node has in flight: told as what that node knows, and
  -- the same with that.
  beside = function(told, spare, told2, spare2, size, _, log)
    if told == told2 then
      return size - log.total - max(spare2 % COUNT - spare % COUNT, 0)
    end
    return size - log.total - spare2 % COUNT
  end,

  started = sliding.started,

  -- The summary with cost more units; they are added to the log if there is one.
  add = function(clear, slack, cost, log)
    if log then
      append(log, now, min(cost, FULL))
    end
    return sliding.add(clear, slack, cost)
  end,

  -- The summary of what is stored and what a node has told. Of each window the
  -- larger count counts, a window being that of the server which ends next to the
  -- node's. If the node knows of more units, they become an entry, as late as they
  -- can have been: when the window ended by the node's reckoning, or now.
  join = function(clear, slack, theirs, counts, _, rate, phase, log)
    if theirs <= now or counts == 0 then
      return clear, slack
    end
    local last, ends = counts % COUNT, theirs - rate
    local before, ends2 = (counts - last) / COUNT, ends - rate
    local mine = slack % COUNT
    local mine2 = (slack - mine) / COUNT
    local late = (theirs - phase) % rate
    local latest = now - (now - phase) % rate + 2 * rate
    local told = min(2 * late < rate and theirs - late or theirs - late + rate, latest)
    local own = log.newest and clear or max(told, latest - rate)
    if told < own then -- what was their last window is the one before
      told, before, ends2, last = own, last, ends, 0
    elseif told > own then
      mine, mine2 = 0, mine
    end
    if before > mine2 and ends2 > now - rate then
      insert(log, min(ends2 - 1, now), min(before - mine2, FULL))
    end
    if last > mine then
      insert(log, min(ends - 1, now), min(last - mine, FULL))
    end
    if not log.newest then
      return clear, slack
    end
    return told, max(before, mine2) * COUNT + max(last, mine)
  end,

  -- The reply about a log besides its summary: the units it holds, the time until
  -- it is empty, and the times until it has room for cost units, and for one, when
  -- so many more are held.
  tell = function(log, size, cost, held, rate)
    local units = log.total + held - size
    return log.total, log.newest and log.newest + rate - now or 0,
      cost <= size and wait(log, units + cost, rate) or 0, wait(log, units + 1, rate)
  end,

  -- The value that stores a log, and the time at which the key expires.
  value = function(log, clear, slack, held, till, rate)
    local value, last = '', log.newest or now
    if held > 0 then
      value, last = pack('>Bddddd', KIND_HOLDS, clear, slack, log.total, held, till), max(last, till)
    else
      value = pack('>Bddd', KIND, clear, slack, log.total)
    end
    value = value .. sub(log.text, log.from, log.upto - 1)
    if log.newest then
      value = value .. pack('>dH', log.newest, log.units)
    end
    return value, last + rate
  end,

  -- The summary of a stored log, or nothing.
  summary = header,

  -- Whether counts are no more than what a node knew.
  within = sliding.within,
}
