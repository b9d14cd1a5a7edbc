package compile

import (
	"slices"
	"strconv"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/usage"
)

// setSettlement sets what requests are charged in the end.
func (l *LimitBuilder) setSettlement() (err error) {
	s := settle.Terms{InProgress: l.Concurrency != "", Count: l.Count, Clear: l.Clear, ActualCost: l.ActualCost}
	switch {
	case usage.IsCost(l.ActualCost):
		if s.Usage, err = l.usage.Parse(l.ActualCost); err != nil {
			return err
		}
	case l.ActualCost != "" && l.ActualCost != settle.ActualBytes && l.ActualCost != settle.ActualDuration && !option.IsTemplate(l.ActualCost):
		return option.Bad("actual_cost", l.ActualCost, "tokens, json and paths, bytes, duration, or a placeholder such as {http.response.header.X-Cost}")
	}
	if err = checkResponses("count", l.Count); err == nil {
		err = checkResponses("clear", l.Clear)
	}
	if err != nil {
		return err
	}
	l.rule.Settlement = s
	if l.Hold == "" {
		return nil
	}
	if !l.rule.Settlement.Holds() && !l.IsGroup() {
		return option.Needs("hold", l.Hold, "count or actual_cost: other limits hold nothing")
	}
	if l.rule.Settlement.HoldOff = readConstant(&l.reader, "hold", l.Hold, option.Is("off", "on", "off")); !l.rule.Settlement.HoldOff {
		l.rule.Hold = "" // as by default
	}
	return nil
}

// checkResponses returns an error if the given option can't have r.
func checkResponses(name string, r *option.Responses) error {
	if r == nil {
		return nil
	}
	for _, code := range slices.Concat(r.StatusCode, r.NotStatusCode) {
		if code < 1 || code > 5 && code < 100 || code > 599 {
			return option.Bad(name, strconv.Itoa(code), useStatusCodes)
		}
	}
	if r.IsEmpty() {
		return option.Bad(name, "", "status codes or header fields of the responses that "+name)
	}
	return nil
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
