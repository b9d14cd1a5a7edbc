-- Bans clients that are denied too often. A charge is a denial of a bucket that this one
-- watches; the size-th begins a ban, and there is no room until that ends. The first ban
-- takes period, the second phase, all later ones drip, which none exceeds. Its time is
-- when all denials are forgotten: drip after the last one, or after the end of the ban.
-- The rest is how many there were. bans.go has the same arithmetic.
local function bans(what, clear, rest, _, at, size, period, drip, phase, other, _, _, otherRest)
  if what == 'room' or what == 'reported' then
    return clear - drip <= at and size or 0

  elseif what == 'add' then
    if clear <= at then
      rest = 0
    elseif clear - drip > at then
      return clear, rest -- a ban does not grow while it lasts
    end
    rest = rest + 1
    if rest % size > 0 then
      return at + drip, rest
    end
    local ban = rest == size and period or rest == 2 * size and phase or drip
    return at + ban + drip, math.min(rest, 2 * size)

  elseif what == 'near' then
    return other

  elseif what == 'join' and other > clear then
    return other, otherRest
  end
  return clear, rest -- the later, or a count of nothing
end
