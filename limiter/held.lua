-- Units are held for a request whose outcome is not known yet: it has other buckets in
-- other slots, or what it costs depends on its response. They take room beside the
-- level, but nothing of them drips. In the end they are settled: let go, and charged then
-- if the request counts. Nothing is ever taken out of a level again, as nobody could tell
-- how much of it has dripped.
--
-- The record of a bucket's held units has the same size however many nodes hold how
-- many. Time is divided into generations: all units that are first held in one share
-- a receipt, the time at which the first of them was held. The record is two such
-- receipts, each with its units: {receipt, units, receipt before, units before}. When
-- a generation and the whole next one have passed, its units lapse: they are charged
-- as of that time, as the node that knows the outcome has crashed or can't reach the
-- server. A node whose request is still running renews its units before that. Whoever
-- settles or renews units names their receipt, so that units which have lapsed, or were
-- lost with the server's data, are not let go at the expense of a later generation. A
-- request whose answer was lost lets nothing go: its units lapse.
local GENERATION = 10000000

-- lapses returns when units of a receipt lapse.
local function lapses(receipt)
  return receipt - receipt % GENERATION + 2 * GENERATION
end

-- present returns a level at now, with the units of its record that have lapsed; how
-- many are still held; and whether the clock was set back so far that their receipts are
-- void: then they stay for their time from now on, and nobody can let them go.
local function present(record, algorithm, clear, rest, size, period, drip, phase, entries)
  for i = 3, 1, -2 do -- the older first
    local at = lapses(record[i])
    if record[i + 1] > 0 and at <= now then
      clear, rest = algorithm('add', clear, rest, record[i + 1], at, size, period, drip, phase, 0, 0, entries)
      record[i + 1] = 0
    end
  end
  local wasSetBack = lapses(record[1]) > lapses(now) + GENERATION
  if wasSetBack then
    record[1], record[2], record[3], record[4] = now, record[2] + record[4], 0, 0
  end
  return clear, rest, record[2] + record[4], wasSetBack
end

-- hold adds units to a record, or to a new one, and returns it.
local function hold(record, units)
  if not record then
    return {now, units, 0, 0}
  elseif lapses(record[1]) < lapses(now) then -- a new generation; the one before the last has lapsed
    record[1], record[2], record[3], record[4] = now, 0, record[1], record[2]
  end
  record[2] = record[2] + units
  return record
end

-- letGo takes units of a receipt out of a record, and reports whether they were held.
local function letGo(record, receipt, units)
  for i = 1, record and 3 or 0, 2 do
    if record[i] == receipt and record[i + 1] >= units then
      record[i + 1] = record[i + 1] - units
      return true
    end
  end
  return false
end

-- isNew reports whether a receipt is of the present generation, so that its units need
-- not be renewed.
local function isNew(record, receipt)
  return record and record[1] == receipt and lapses(receipt) == lapses(now)
end
holds = {lapses = lapses, present = present, hold = hold, letGo = letGo, isNew = isNew}
