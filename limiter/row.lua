-- What a call says of a bucket and what is found of it are locals, since most groups have one
-- bucket. Where there are several, each has a row that keeps them from pass to pass, and from
-- group to group of a run. A row is a list: the fields that are named here are replaced by
-- their places in it where the script is composed, because a name for a key costs time.

--# arguments
local rows = several and {}
local algorithm, kind, counts, dry, role, size, period, drip, phase, cost
local reported, reportedRest, inFlight, reportedStart -- of the level that the node knows
local ahead, least -- to LEASE
local account -- what the call says of one, or false, see held.lua

--# what is found
local clear, rest -- the level
local held, record -- how many units are held, and their record, if there is one
local fits -- whether there is room
local blocked -- whether there is none only because of units that are held or in flight
local borrowed -- whether anything is borrowed from a pool
local changed -- whether the key has to be written
local foreign -- whether it has something that is not a bucket
local entries -- of an algorithm that keeps them
local charge, receipt -- what follows: how many units are charged, and what is replied of the account
local resets -- whether the key is emptied after the reply
local admitted -- of all buckets: whether none denies the request
local late -- and whether a later call of the node has counted what it holds

--# new
if several then
  rows[i] = {
    algorithm = algorithm, kind = kind, counts = counts, dry = dry, role = role, size = size, period = period, drip = drip,
    phase = phase, cost = cost, reported = reported, reportedRest = reportedRest, inFlight = inFlight, reportedStart = reportedStart, account = account,
    ahead = ahead, least = least, clear = 0, rest = 0, held = 0, record = false, fits = false, blocked = false,
    changed = false, foreign = false, entries = false, borrowed = false
  }
end

--# bucket
if several then
  local row = rows[i]
  algorithm, kind, dry, role, size, period, drip, phase, cost, reported, reportedRest, inFlight, reportedStart, account, ahead, least =
    row.algorithm, row.kind, row.dry, row.role, row.size, row.period, row.drip, row.phase, row.cost, row.reported,
    row.reportedRest, row.inFlight, row.reportedStart, row.account, row.ahead, row.least
end

--# keep
if several then
  local row = rows[i]
  row.clear, row.rest, row.held, row.record, row.fits, row.blocked, row.changed, row.foreign, row.entries, row.borrowed =
    clear, rest, held, record, fits, blocked, changed, foreign, entries, borrowed
end

--# charged
if several then
  local row = rows[i]
  algorithm, kind, counts, role, size, period, drip, phase, cost, inFlight, reportedStart, account, clear, rest, held, record, fits, blocked, changed,
    foreign, entries, borrowed = row.algorithm, row.kind, row.counts, row.role, row.size, row.period, row.drip, row.phase, row.cost,
    row.inFlight, row.reportedStart, row.account, row.clear, row.rest, row.held, row.record, row.fits, row.blocked, row.changed, row.foreign,
    row.entries, row.borrowed
end
