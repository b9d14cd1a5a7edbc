package compile

import (
	"slices"
	"strconv"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
)

// setSettlement sets what requests are charged in the end.
func (d *LimitBuilder) setSettlement() (err error) {
	s := rule.Settlement{InProgress: d.Concurrency != "", Count: d.Count, ActualCost: d.ActualCost}
	switch {
	case usage.IsCost(d.ActualCost):
		if s.Usage, err = d.usage.Parse(d.ActualCost); err != nil {
			return err
		}
	case d.ActualCost != "" && d.ActualCost != rule.ActualBytes && d.ActualCost != rule.ActualDuration && !option.IsTemplate(d.ActualCost):
		return option.Bad("actual_cost", d.ActualCost, "tokens, json and paths, bytes, duration, or a placeholder such as {http.response.header.X-Cost}")
	}
	if d.Count != nil {
		for _, code := range slices.Concat(d.Count.StatusCode, d.Count.NotStatusCode) {
			if code < 1 || code > 5 && code < 100 || code > 599 {
				return option.Bad("count", strconv.Itoa(code), useStatusCodes)
			}
		}
		if d.Count.IsEmpty() {
			return option.Bad("count", "", "status codes or header fields of the responses that count")
		}
	}
	d.rule.Settlement = s
	if d.Hold == "" {
		return nil
	}
	if !d.rule.Settlement.Holds() && !d.IsGroup() {
		return option.Needs("hold", d.Hold, "count or actual_cost: other limits hold nothing")
	}
	d.rule.Settlement.HoldOff, err = option.ParseConstant("hold", d.Hold, option.Is("off", "on", "off"))
	return err
}

const useStatusCodes = "status codes from 100 to 599, or classes such as 4xx (in JSON 4)"

// ParseStatusCode parses the status of responses, or a class of it, which is a single digit.
func ParseStatusCode(text string) (code int, use string) {
	if class, is := strings.CutSuffix(text, "xx"); is && len(class) == 1 {
		text = class
	}
	code, err := strconv.Atoi(text)
	if err != nil {
		use = useStatusCodes
	}
	return code, use
}
