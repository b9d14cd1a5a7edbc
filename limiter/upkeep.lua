-- All operations but those that decide: each bucket on its own, whatever the others of its group
-- hold.

fits, blocked, charge, receipt, resets = true, false, 0, 0, false
--@ row.lua: bucket
--@ value.lua: read
if account and (what == SETTLE or what == RENEW) then -- before the join: the level that the node reports has that charge
  local there, gone = false, 0
  if what == SETTLE then
    there, gone, charge = holds.settle(record, account)
    changed = changed or there
  elseif holds.isLate(record, account) then
    receipt = -1
  else
    record, there, gone, charge = holds.renew(record, account, cost)
    changed = true
  end
  if there then
    receipt = 1
  end
  held = record and holds.held(record) or 0
  if charge > gone then -- a debt of size at most
    charge = min(charge, max(gone, size + algorithm('room', clear, rest, 0, now, size, period, drip, phase, 0, 0, entries)))
  end
  if charge > 0 then
    clear, rest = algorithm('add', clear, rest, charge, now, size, period, drip, phase, 0, 0, entries)
    clear, charge, changed = min(clear, now + HORIZON), 0, true
  end
end
--@ value.lua: join

if what == SETTLE then
  if not account then -- nothing was held: a debt of size at most, too
    charge = min(cost, max(0, size + algorithm('room', clear, rest, 0, now, size, period, drip, phase, 0, 0, entries)))
  end

elseif what == LEASE then
  local most = size + ahead
  local room = algorithm('room', clear, rest, taken, now, most, period, drip, phase, 0, 0, entries)
  if near then
    room = min(room, algorithm('reported', near, reportedRest, inFlight, now, most, period, drip, phase, 0, 0, entries) - held)
  end
  local share = min(cost, floor(room / 4)) -- so that idle nodes leave room to others
  charge = share >= least and share or 0 -- of less, a request would do as well

elseif what == REPORT then
  charge = cost

elseif what == PROBE then -- which does not know the bucket's numbers
  changed = false
  if type(value) == 'string' then
    call('SET', keys[key + i], value, 'KEEPTTL')
    clear, foreign = clear > now and clear or now + 1, false
  end

elseif what == REMOVE then -- if the stored level would add nothing to the reported one
  changed = false
  if clear > now and not record then
    local c = algorithm('near', reported, reportedRest, 0, now, size, period, drip, phase, clear, 0)
    local c2, s2 = algorithm('join', reported, reportedRest, 0, now, size, period, drip, phase, c, 0, false, rest)
    if c2 == reported and s2 == reportedRest then -- no request waits for it, so an error must not end the call
      tryCall('SET', keys[key + i], '', 'PX', 1)
    end
  end

elseif what == CLEAR then
  clear, rest, changed = now, 0, record and record[1]
  resets = not changed and (value or entries)
  if entries then
    entries.empty(entries)
  end

elseif what >= PEEK then
  changed = false
  resets = what == RESET and (value or entries)
end
