package convert

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxNodes is how many fields of YAML are read: with aliases, a small file may
// match any number.
const maxNodes = 20_000

// reader reads the fields of YAML.
type reader struct {
	nodes int // fields that were read
}

// field is a field of a mapping in YAML.
type field struct {
	name  string
	line  int // of the name
	value *yaml.Node
}

// fields returns the fields of a mapping. Their names are in lower case: tutorials
// also write Value.
func (r *reader) fields(node *yaml.Node, in string) ([]field, error) {
	return r.entries(node, in, strings.ToLower)
}

// entries returns the fields of a mapping, with what named makes of their names.
func (r *reader) entries(node *yaml.Node, in string, named func(string) string) ([]field, error) {
	node = resolve(node)
	if node.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d: %s: not valid; use fields with values", node.Line, in)
	}
	var fields []field
	var merged []*yaml.Node
	seen := make(map[string]bool)
	for i := 0; i+1 < len(node.Content); i += 2 {
		if r.nodes++; r.nodes > maxNodes {
			return nil, fmt.Errorf("line %d: too many fields; use at most %d in all", node.Line, maxNodes)
		}
		line, key := node.Content[i].Line, resolve(node.Content[i])
		if key.Tag == "!!merge" {
			merged = append(merged, node.Content[i+1])
			continue
		}
		name := named(key.Value)
		if seen[name] {
			return nil, fmt.Errorf("line %d: %s: %q is given twice; use it once", line, in, name)
		}
		seen[name] = true
		fields = append(fields, field{name, line, resolve(node.Content[i+1])})
	}
	for _, from := range merged {
		more, err := r.merged(from, in, named)
		if err != nil {
			return nil, err
		}
		for _, f := range more {
			if !seen[f.name] {
				seen[f.name] = true
				fields = append(fields, f)
			}
		}
	}
	return fields, nil
}

// merged returns the fields of what follows <<, a mapping or a list of them, of
// which the first counts.
func (r *reader) merged(from *yaml.Node, in string, named func(string) string) (fields []field, err error) {
	list := []*yaml.Node{from}
	if resolve(from).Kind == yaml.SequenceNode {
		list = resolve(from).Content
	}
	for _, node := range list {
		if r.nodes++; r.nodes > maxNodes {
			return nil, fmt.Errorf("line %d: too many fields; use at most %d in all", node.Line, maxNodes)
		}
		more, err := r.entries(node, in, named)
		if err != nil {
			return nil, err
		}
		fields = append(fields, more...)
	}
	return fields, nil
}

// resolve returns what an alias refers to.
func resolve(node *yaml.Node) *yaml.Node {
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	return node
}

// isNull reports whether a node has no value.
func isNull(node *yaml.Node) bool { return node.Kind == yaml.ScalarNode && node.Tag == "!!null" }

// text returns the value of a field that is text.
func (f field) text() (string, error) {
	if f.value.Kind != yaml.ScalarNode {
		return "", fmt.Errorf("line %d: %s: not valid; use one value", f.value.Line, f.name)
	}
	if isNull(f.value) {
		return "", nil
	}
	return f.value.Value, nil
}

// flag returns the value of a field that is true or false.
func (f field) flag() (on bool, err error) {
	if isNull(f.value) {
		return false, nil
	}
	if f.value.Kind != yaml.ScalarNode || f.value.Decode(&on) != nil {
		return false, fmt.Errorf("line %d: %s: %q is not valid; use true or false", f.value.Line, f.name, f.value.Value)
	}
	return on, nil
}

// number returns the value of a field that is a number, as YAML has it: 020 is 16.
// A number in quotes is decimal.
func (f field) number() (n uint32, err error) {
	switch {
	case f.value.Kind != yaml.ScalarNode || isNull(f.value):
		err = errors.New("no number")
	case f.value.Tag == "!!str":
		var decimal uint64
		decimal, err = strconv.ParseUint(f.value.Value, 10, 32)
		n = uint32(decimal) // ParseUint checked it
	default:
		err = f.value.Decode(&n)
	}
	if err != nil {
		return 0, fmt.Errorf("line %d: %s: %q is not valid; use a whole number below 2^32", f.value.Line, f.name, f.value.Value)
	}
	return n, nil
}

// unlimiting reports whether fields of this name are known not to limit anything.
func unlimiting(name string) bool {
	return slices.Contains([]string{"metadata", "description", "comment", "labels", "annotations"}, name) || strings.HasPrefix(name, "x-")
}
