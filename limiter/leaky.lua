-- A leaky bucket loses drip units every period: at the times phase + k·period by the
-- clock or, with a phase of -1, counted from the first charge after it was empty. The
-- time of its level is the time of the drip with which it runs empty, and the rest is the
-- number of units by which that drip falls short of a full one. leaky.go has the same arithmetic.
local function leaky(what, clear, rest, n, at, size, period, drip, phase, other, otherStart, _, otherRest)
  if what == 'room' or what == 'reported' then
    if clear <= at then
      return size - n
    end
    local left = clear - at
    return size - n + rest - (left + -left % period) / period * drip

  elseif what == 'add' then
    if clear <= at then
      clear, rest = phase < 0 and at or at - (at - phase) % period, 0
    end
    n = n - rest
    local whole = n + -n % drip
    return clear + whole / drip * period, whole - n

  elseif what == 'near' then -- levels end with a drip: take the nearest, if that is known
    if phase >= 0 then
      other = phase + math.floor((other - phase) / period + 0.5) * period
    elseif clear > at and otherStart == 0 then
      other = clear + math.floor((other - clear) / period + 0.5) * period
    end
    return other

  elseif what == 'count' then -- the level joins one that is full, as of now
    local units = size - n
    if units < 1 then
      return clear, rest
    end
    local whole = units + -units % drip
    other, otherRest = (phase < 0 and at or at - (at - phase) % period) + whole / drip * period, whole - units
  end

  -- join, of the level that count has made too: of levels that end in different drips, a
  -- period or more apart, the later holds no less than the other, now and at any time
  -- until then; of two that end in one drip, that with less rest.
  if clear <= at or other - clear >= period then
    return other, otherRest
  elseif other - clear <= -period then
    return clear, rest
  end
  return other > clear and other or clear, otherRest < rest and otherRest or rest
end
