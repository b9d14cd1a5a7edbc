package convert

import (
	"bytes"
	"errors"
	"fmt"
	"io"
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

// documents calls f with each document of text, except empty ones, such as between two lines of ---.
func documents(text []byte, f func(*yaml.Node) error) error {
	for decoder := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var document yaml.Node
		err := decoder.Decode(&document)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return errors.New(oneLine(err.Error()))
		case len(document.Content) != 1 || isNull(document.Content[0]):
			continue
		}
		if err := f(document.Content[0]); err != nil {
			return err
		}
	}
}

// target is where the value of a field goes: a *string, *bool or *uint32, or a func(field) error.
type target struct {
	name string
	into any
}

// decode reads a mapping. A field without a target is noted if it limits nothing, and otherwise an
// error, as it may have been meant to limit.
func (c *conversion) decode(node *yaml.Node, in string, targets ...target) error {
	fields, err := c.fields(node, in)
	if err != nil {
		return err
	}
	for _, f := range fields {
		i := slices.IndexFunc(targets, func(t target) bool { return t.name == f.name })
		if i < 0 {
			err = c.otherField(f, in, targets)
		} else {
			err = f.decode(targets[i].into)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// decode sets a target to the value of a field.
func (f field) decode(into any) (err error) {
	switch into := into.(type) {
	case *string:
		*into, err = f.text()
	case *bool:
		*into, err = f.flag()
	case *uint32:
		*into, err = f.number()
	case func(field) error:
		err = into(f)
	}
	return err
}

// list calls f with the nodes of a list, of which there are none if the field has no value.
func (f field) list(of string, each func(*yaml.Node) error) error {
	if isNull(f.value) {
		return nil
	}
	if f.value.Kind != yaml.SequenceNode {
		return fmt.Errorf("line %d: %s: not valid; use a list%s", f.value.Line, f.name, of)
	}
	for _, node := range f.value.Content {
		if err := each(node); err != nil {
			return err
		}
	}
	return nil
}

// otherField notes a field that limits nothing where it is, and returns an error for any other.
func (c *conversion) otherField(f field, in string, targets []target) error {
	switch {
	case slices.Contains(c.misplaced, f.name):
		c.note(f.line, f.name+": it is left out, as it has no effect in a "+in+".")
		return nil
	case unlimiting(f.name):
		c.note(f.line, f.name+": it is left out, as it does not limit.")
		return nil
	}
	names := make([]string, 0, len(targets))
	for _, t := range targets {
		names = append(names, t.name)
	}
	use := strings.Join(names, ", ")
	if len(names) > 1 {
		use = "one of " + use
	}
	return fmt.Errorf("line %d: %s: unknown field %q; use %s", f.line, oneLine(in), f.name, use)
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
		n = uint32(decimal)
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
