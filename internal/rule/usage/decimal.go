package usage

import (
	"math"
	"math/big"
	"strconv"
	"strings"
)

// decimal is digits × 10^exponent. Binary fractions would not do: 100 tokens at 0.07 are 7
// units, and rounded up they would be 8.
type decimal struct {
	digits   uint64
	exponent int32
}

// maxExponent is the largest exponent that is distinguished from larger ones, and, negative, the smallest:
// beyond it, a number is more than any bucket holds, or the smallest that there is.
const maxExponent = 100

// parseDecimal parses a number as JSON has it. It returns false if it is not a number or negative.
// Of more than 18 digits the rest is rounded up.
func parseDecimal(text string) (d decimal, ok bool) {
	mantissa, exponent := text, ""
	if i := strings.IndexAny(text, "eE"); i >= 0 {
		if mantissa, exponent = text[:i], text[i+1:]; exponent == "" {
			return d, false
		}
	}
	whole, fraction, point := strings.Cut(mantissa, ".")
	if whole == "" || len(whole) > 1 && whole[0] == '0' || point && fraction == "" {
		return d, false
	}
	shift, up := 0, uint64(0)
	for i, c := range []byte(whole + fraction) {
		switch {
		case c < '0' || c > '9':
			return d, false
		case d.digits >= 1e17:
			up |= uint64(c - '0')
			if i < len(whole) {
				shift++
			}
		default:
			d.digits = d.digits*10 + uint64(c-'0')
			if i >= len(whole) {
				shift--
			}
		}
	}
	if up > 0 {
		d.digits++
	}
	if exponent != "" {
		n, err := strconv.Atoi(exponent)
		if err != nil && n == 0 {
			return d, false
		}
		shift += max(min(n, 1000), -1000)
	}
	d.exponent = int32(max(min(shift, maxExponent), -maxExponent)) // it fits
	return d, true
}

// plus returns the sum. Of more than 18 digits the rest is rounded up.
func (d decimal) plus(o decimal) decimal {
	if d.digits == 0 {
		return o
	}
	if d.exponent < o.exponent {
		d, o = o, d
	}
	for ; d.exponent > o.exponent && d.digits < 1e17; d.exponent-- {
		d.digits *= 10
	}
	for ; d.exponent > o.exponent && o.digits > 1; o.exponent++ {
		o.digits = (o.digits + 9) / 10
	}
	if d.digits += o.digits; d.digits >= 1e18 {
		d.digits, d.exponent = (d.digits+9)/10, d.exponent+1
	}
	return d
}

// rat returns the number.
func (d decimal) rat() *big.Rat {
	power := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(max(d.exponent, -d.exponent))), nil)
	n := new(big.Int).SetUint64(d.digits)
	if d.exponent >= 0 {
		return new(big.Rat).SetInt(n.Mul(n, power))
	}
	return new(big.Rat).SetFrac(n, power)
}

// roundUp returns the next whole number, or the largest.
func roundUp(r *big.Rat) int64 {
	n := new(big.Int).Add(r.Num(), new(big.Int).Sub(r.Denom(), big.NewInt(1)))
	if n.Quo(n, r.Denom()); !n.IsInt64() {
		return math.MaxInt64
	}
	return n.Int64()
}
