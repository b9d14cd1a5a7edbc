-- ALL and EACH decide a request. Whether a bucket is charged depends on the others of its
-- group, so there are two passes: the first finds which have room, the second charges.

--# roles
-- What a bucket means to the others of its group is its role:
local PLAIN = 0 -- no room denies the request
local BORROWS = 254 -- what it has no room for is left to the next pool
local POOL = 255 -- charged if the request is admitted and one of those before it that borrow, up to another pool, had no room; if there is none in the pool either, that denies the request
-- n, in between: it watches the n buckets before it. No room denies the request, and they have
-- none either then. It is charged only if one of them denies the request, and not because of
-- units that are held.

--# fits
admitted, late = true, false
local short = false -- whether a bucket lacks room for which the next pool may make up
for i = 1, buckets do
  --@ row.lua: bucket
  --@ value.lua: read
  --@ value.lua: join
  late = late or account and record and holds.isLate(record, account)

  local need = cost > 0 and cost or account and 0 or 1 -- what has a cost of 0 is free with HOLDS; without, its cost is not known yet, or it watches
  fits, blocked, borrowed = need == 0 or algorithm('room', clear, rest, 0, now, size, period, drip, phase, 0, 0, entries) >= need, false, false
  if fits and need > 0 and taken > 0 then
    fits = algorithm('room', clear, rest, taken, now, size, period, drip, phase, 0, 0, entries) >= need
    blocked = not fits
  end
  if fits and need > 0 and near then
    -- Nor may the level that the node knows lack room, next to what it has in flight and no account
    -- holds, and what all accounts hold: 'reported' subtracts the former, and the latter is needed too.
    local reserved = account and holds.missing(record, account, inFlight) or inFlight
    local left = algorithm('reported', near, reportedRest, reserved, now, size, period, drip, phase, 0, 0, entries)
    fits = left >= need + held
    blocked = not fits
  end

  if role == BORROWS then
    short = short or not fits
  elseif role == POOL then
    admitted = admitted and (fits or not short or dry)
    borrowed, short = short, false
  else
    admitted = admitted and (fits or dry)
    if role > PLAIN and not fits and several then -- those that it watches; alone in its slot, it has none here
      for j = i - role, i - 1 do
        rows[j].fits = false
      end
    end
  end
  --@ row.lua: keep
end

--# charge
--@ row.lua: charged
charge, receipt = 0, late and -1 or 0
if late then -- nothing is done for the group
elseif role == POOL then
  charge = fits and admitted and borrowed and cost or 0
elseif role > PLAIN and role ~= BORROWS then
  if several then
    for j = i - role, i - 1 do
      if fits and not rows[j].fits and not rows[j].blocked then
        charge = cost
      end
    end
  end
elseif fits then
  charge = (admitted or counts or what == EACH and not account) and cost or 0
elseif counts then
  local c, s = clear, rest
  clear, rest = algorithm('count', c, s, held, now, size, period, drip, phase, cost, 0, entries)
  changed = changed or clear ~= c or rest ~= s or entries ~= false
end
if account and admitted and charge > 0 then -- hold it instead
  record, receipt = holds.hold(record, account, charge)
  held, changed, charge = held + cost, true, 0
end
