-- Units are held for a request whose outcome is not known yet: it has other buckets in
-- other slots, or what it costs depends on its response. They take room in addition to the
-- level, but nothing of them drips. In the end they are settled: released, and charged then
-- if the request counts. Nothing is ever taken out of a level again: it is unknown how
-- much of it has dripped.
--
-- The record of a bucket's held units has an account for each process that holds some:
--
--   process, number  name it. A process takes a higher number for each account that it opens
--   receipt          when a hold opened it, or 0 if a renewal did
--   seen             when its process was last heard of
--   held             how many units it holds
--   ended, charged   how many units its requests have released and been charged since it was
--                    opened, in total
--
-- A process settles by sending these totals. The greater ones count, so it does not matter
-- how often or in which order they arrive: a process sends them until it is answered.
-- What names an account that is not there, or was reopened, changes nothing: its units have
-- lapsed, or were lost with the server's data.
--
-- A process that is in doubt about its account, and every one now and then, replaces its
-- accounts by a new one, which says what it holds now. It repeats that too until it is
-- answered: an account with receipt 0 has been renewed. A call that arrives after one with a higher number
-- is late: it does nothing, since that one has counted what it requests.
--
-- An account is removed when it holds nothing, but a renewed one stays, so that it is known
-- which calls are late. When nothing has been heard of its process for LAPSE, it is removed
-- too, and what it holds is charged: the process has crashed, or can't reach the server.
local LAPSE, FIELDS = 15000000, 7
local PROCESS, NUMBER, RECEIPT, SEEN, HELD, ENDED, CHARGED = 1, 2, 3, 4, 5, 6, 7

-- A process reports the level that it knows, too, which has what it was told to be charged. So a
-- server that lacks a part of that, since it was a replica, does not charge it by the totals.
--
-- An update of an account is a list, as it is read from the call, see core.lua. The first
-- two name the account; the next four are what SETTLE and RENEW say of it; the last three are
-- for the account before, which RENEW replaces. KNOWN is how many units of those that SETTLE or,
-- for the account before, RENEW is to charge are in the level that the process knows.
local ENDED_NOW, CHARGED_NOW, KNOWN, NUMBER_BEFORE, RECEIPT_BEFORE, CHARGED_BEFORE = 4, 5, 6, 7, 8, 9

-- parse returns the record that begins at an offset of a text, or nothing if that is no record.
local function parse(text, offset)
  local record = {}
  for i = 1, (#text + 1 - offset) / 8 / FIELDS do
    local account = {read('>ddddddd', text, offset)}
    offset = account[FIELDS + 1]
    for field = 1, FIELDS do
      local n = account[field]
      if not (n >= 0 and n < 2 ^ 53 and n % 1 == 0) then
        return
      end
    end
    record[i] = account
  end
  return record
end

-- text returns a record as it is stored.
local function text(record)
  local texts = {}
  for i, account in ipairs(record) do
    texts[i] = pack('>ddddddd', fields(account, 1, FIELDS))
  end
  return table.concat(texts)
end

-- lapses returns when the last units of a record lapse.
local function lapses(record)
  local last = 0
  for _, account in ipairs(record) do
    last = max(last, account[SEEN] + LAPSE)
  end
  return last
end

-- present returns a level at now, with the units of its record that have lapsed; how
-- many are still held; and whether the clock was set back: then they stay for their time
-- from now on.
local function present(record, algorithm, clear, rest, size, period, drip, phase, entries)
  local held, wasSetBack = 0, false
  repeat
    local first
    held = 0
    for i, account in ipairs(record) do
      if account[SEEN] > now then
        account[SEEN], wasSetBack = now, true
      end
      if account[SEEN] + LAPSE <= now and (not first or account[SEEN] < record[first][SEEN]) then
        first = i
      end
      held = min(held + account[HELD], HORIZON)
    end
    if first then -- the oldest first
      local account = table.remove(record, first)
      if account[HELD] > 0 then
        clear, rest = algorithm('add', clear, rest, account[HELD], account[SEEN] + LAPSE, size, period, drip, phase, 0, 0, entries)
      end
    end
  until not first
  return clear, rest, held, wasSetBack
end

-- find returns the account of a record with a process and a number, and its place.
local function find(record, process, number)
  for i, account in ipairs(record or {}) do
    if account[PROCESS] == process and account[NUMBER] == number then
      return account, i
    end
  end
end

-- isLate reports whether a call that names an account is late.
local function isLate(record, update)
  for _, account in ipairs(record or {}) do
    if account[PROCESS] == update[PROCESS] and account[NUMBER] > update[NUMBER] then
      return true
    end
  end
  return false
end

-- open returns the named account of a record, which is made if it is not there, and the record.
local function open(record, update, receipt)
  record = record or {}
  local account = find(record, update[PROCESS], update[NUMBER])
  if not account then
    account = {update[PROCESS], update[NUMBER], receipt, now, 0, 0, 0}
    record[#record + 1] = account
  end
  account[SEEN] = now
  return account, record
end

-- hold adds units to an account, and returns the record and the account's receipt.
local function hold(record, update, units)
  local account, all = open(record, update, now)
  account[HELD] = min(account[HELD] + units, HORIZON)
  return all, account[RECEIPT]
end

-- owed returns how many units an account is still to be charged.
local function owed(account, charged, known)
  return max(charged - max(account[CHARGED], known), 0)
end

-- total raises the totals of an account, and returns how many units that releases and charges.
local function total(account, ended, charged, known)
  local gone, charge = max(ended - account[ENDED], 0), owed(account, charged, known)
  account[HELD], account[ENDED], account[CHARGED] = max(account[HELD] - gone, 0), account[ENDED] + gone, max(account[CHARGED], charged)
  return gone, charge
end

-- settle raises the totals of the account with a receipt, and returns whether it is there, and
-- how many units that releases and charges. update has its process, its number, the receipt and
-- the totals.
local function settle(record, update)
  local account, i = find(record, update[PROCESS], update[NUMBER])
  if not account or account[RECEIPT] ~= update[RECEIPT] then
    return false, 0, 0
  end
  account[SEEN] = now
  local gone, charge = total(account, update[ENDED_NOW], update[CHARGED_NOW], update[KNOWN])
  if account[HELD] == 0 and account[RECEIPT] ~= 0 then
    table.remove(record, i)
  end
  return true, gone, charge
end

-- renew replaces the accounts of a process by a new one with that many units, unless it is that
-- already. update has what settle needs of the new one, with receipt 0; and the number and the
-- receipt of the one before, with how many units its requests have been charged. It returns
-- the record; whether that account was there; and what settle returns besides.
local function renew(record, update, units)
  local account, all = open(record, update, now)
  local known, gone, charge = true, 0, 0
  if account[RECEIPT] ~= 0 then
    local old = find(all, update[PROCESS], update[NUMBER_BEFORE])
    known = old ~= nil and old[RECEIPT] == update[RECEIPT_BEFORE]
    if known then
      gone, charge = old[HELD], owed(old, update[CHARGED_BEFORE], update[KNOWN])
    end
    for i = #all, 1, -1 do
      if all[i][PROCESS] == update[PROCESS] and all[i][NUMBER] < update[NUMBER] then
        table.remove(all, i)
      end
    end
    account[RECEIPT], account[HELD] = 0, min(account[HELD] + units, HORIZON)
  end
  local gone2, charge2 = total(account, update[ENDED_NOW], update[CHARGED_NOW], 0)
  return all, known, gone + gone2, charge + charge2
end

-- missing returns how many of the units that a node has in flight are in no account of its process.
local function missing(record, update, inFlight)
  for _, account in ipairs(record or {}) do
    inFlight = inFlight - (account[PROCESS] == update[PROCESS] and account[HELD] or 0)
  end
  return max(inFlight, 0)
end

-- held returns how many units a record holds.
local function held(record)
  local n = 0
  for _, account in ipairs(record) do
    n = min(n + account[HELD], HORIZON)
  end
  return n
end
holds = {parse = parse, text = text, lapses = lapses, present = present, isLate = isLate, hold = hold, settle = settle, renew = renew, missing = missing, held = held}
