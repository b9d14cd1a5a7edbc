-- A fixed window loses all that it holds when it ends. phase is when windows begin by
-- the clock, or -1 if each begins with the first charge after the one before. Its time
-- is when it ends, and its rest the units that it holds; period is how long it is.
-- window.go has the same arithmetic.
local function window(what, clear, rest, n, at, size, period, _, phase, other, otherStart, _, otherRest)
  if what == 'room' or what == 'reported' then
    return clear > at and size - n - rest or size - n

  elseif what == 'add' or what == 'count' then
    if what == 'count' and n >= size then
      return clear, rest
    elseif clear <= at then
      clear, rest = (phase < 0 and at or at - (at - phase) % period) + period, 0
    end
    if what == 'count' then -- it is full until it ends
      return clear, math.max(rest, size - n)
    end
    return clear, math.min(rest + n, 562949953421312)

  elseif what == 'near' then -- the nearest end, if that is known
    local last = at + period -- no window ends later
    if phase >= 0 then
      other, last = phase + math.floor((other - phase) / period + 0.5) * period, last - (at - phase) % period
    elseif clear > at and otherStart == 0 then
      other = clear + math.floor((other - clear) / period + 0.5) * period
    end
    return math.min(other, last)
  end

  -- join: the later window, or of one that both know the larger count.
  if clear <= at or other - clear >= period then
    return other, otherRest
  elseif other - clear <= -period then
    return clear, rest
  end
  return math.max(clear, other), math.max(rest, otherRest)
end
