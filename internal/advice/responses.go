package advice

import (
	"fmt"
	"slices"
	"strings"

	"github.com/seed-387a6c65/caddy-ratelimit/internal/config/option"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/request/placeholder"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/routes"
	"github.com/seed-387a6c65/caddy-ratelimit/internal/rule/settle"
)

// onResponses returns advice on what a limit reads of responses and none has.
func onResponses(s *settle.Terms, around *routes.Around) (found []Advice) {
	add := func(problem, remedy string) {
		found = append(found, Advice{Kind: NeverCounts, Problem: problem, Remedy: remedy})
	}
	for _, of := range []struct {
		option, does string
		responses    *option.Responses
	}{{"count", "It counts", s.Count}, {"clear", "It is cleared by", s.Clear}} {
		if of.responses == nil {
			continue
		}
		fields := fieldsOf(of.responses.Headers)
		slices.Sort(fields)
		for _, field := range fields {
			by := around.Removes(field)
			switch {
			case !isToken(field):
				add(fmt.Sprintf("%s responses with the field %s, which no response has: it is not a field name.", of.does, field), "Write "+of.option+" header "+fieldMeant(field)+".")
			case of.responses.Headers[field] != nil && by != "":
				add(fmt.Sprintf("%s responses with the field %s, which %s removes before they get here.", of.does, field, by),
					"Remove the field with the directive header, before the limit, as in header -"+field+".")
			}
		}
	}
	for _, name := range placeholder.In(s.ActualCost) {
		if a, unset := unsetByResponse(name, around); unset {
			add("Its actual_cost has {"+name+"}, which "+a.Problem+", and requests are charged their cost.", a.Remedy)
		}
	}
	return found
}

// unsetByResponse returns advice on a placeholder that neither a request nor its response sets.
func unsetByResponse(name string, around *routes.Around) (Advice, bool) {
	const header = "http.response.header."
	field, ofResponse := strings.CutPrefix(name, header)
	switch {
	case ofResponse && isToken(field):
		return Advice{}, false
	case ofResponse:
		return Advice{Problem: noPlaceholder, Remedy: "Use {" + header + fieldMeant(field) + "}."}, true
	case strings.HasPrefix(name, "http.response."), strings.HasPrefix(name, "response."), strings.HasPrefix(name, "http.resp."):
		field = name[strings.LastIndexByte(name, '.')+1:]
		return Advice{Problem: noPlaceholder, Remedy: "Use {" + header + field + "}."}, true
	case placeholder.IsUnknownOfProxy(name):
		return Advice{Problem: noPlaceholder, Remedy: "Use {" + header + "X}, or one of https://caddyserver.com/docs/json/apps/http/servers/routes/handle/reverse_proxy/."}, true
	}
	return neverSet(name, around)
}
