package convert

import (
	"errors"
	"fmt"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// object is an object of Kubernetes.
type object struct {
	kind  string
	line  int
	data  *yaml.Node   // of a ConfigMap; nil if it has none
	items []*yaml.Node // of a list
}

// objectOf returns a document as an object of Kubernetes, or nil if it is not one.
func (e *envoy) objectOf(node *yaml.Node) (*object, error) {
	fields, err := e.fields(node, "configuration")
	if err != nil {
		return nil, err
	}
	isObject, o := false, &object{line: node.Line}
	for _, f := range fields {
		switch f.name {
		case "apiversion":
			isObject = true
		case "kind":
			o.kind = f.value.Value
		case "data":
			o.data = f.value
		case "items":
			o.items = f.value.Content
		}
	}
	if !isObject || o.kind == "" {
		return nil, nil // not an object of Kubernetes
	}
	return o, nil
}

// filesIn returns the files in a ConfigMap. Unlike fields, their names are kept as they
// are.
func filesIn(node *yaml.Node) (files []field, err error) {
	if node == nil || isNull(node) {
		return nil, nil
	}
	if node.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d: data: not valid; use files by their names", node.Line)
	}
	for i := 0; i+1 < len(node.Content); i += 2 {
		files = append(files, field{node.Content[i].Value, node.Content[i].Line, resolve(node.Content[i+1])})
	}
	return files, nil
}

// unpack converts the files in a ConfigMap, or in the ConfigMaps of a list. Other objects are
// noted.
func (e *envoy) unpack(o *object) error {
	switch o.kind {
	case "ConfigMap":
		files, err := filesIn(o.data)
		if err != nil {
			return err
		}
		for _, f := range files {
			if err := e.unpackFile(f); err != nil {
				return err
			}
		}
	case "List", "ConfigMapList":
		for _, item := range o.items {
			if err := e.unpackItem(item); err != nil {
				return err
			}
		}
	default:
		e.other = o.kind
		e.note(o.line, "kind: the "+o.kind+" is left out, as only a ConfigMap may hold limits.")
	}
	return nil
}

// unpackItem converts an object in a list.
func (e *envoy) unpackItem(item *yaml.Node) error {
	o, err := e.objectOf(item)
	if err != nil {
		return err
	}
	if o == nil || len(o.items) > 0 {
		return fmt.Errorf("line %d: items: not valid; use objects of Kubernetes", item.Line)
	}
	return e.unpack(o)
}

// unpackFile converts a file in a ConfigMap. One that has no domain is noted.
func (e *envoy) unpackFile(f field) error {
	text, err := f.text()
	if err != nil {
		return err
	}
	if !domain.MatchString(text) {
		e.note(f.line, f.name+": the file is left out, as it has no domain.")
		return nil
	}
	before := f.value.Line - 1
	if f.value.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 {
		before++ // the text begins in the next line
	}
	if err := e.documents([]byte(text), before); err != nil {
		return errors.New(oneLine(f.name) + ": " + err.Error())
	}
	return nil
}

// What a configuration for Envoy has: a domain, or a ConfigMap around it.
var (
	domain    = regexp.MustCompile(`(?m)^\{?["']?[Dd]omain["']?[ \t]*:`)
	configMap = regexp.MustCompile(`(?m)(^|[{,])[ \t]*["']?kind["']?[ \t]*:[ \t]*["']?(ConfigMap|List|ConfigMapList)\b`)
)

// IsEnvoy reports whether text seems to be a configuration of envoyproxy/ratelimit.
func IsEnvoy(text []byte) bool { return domain.Match(text) || configMap.Match(text) }

// moveDown adds to the lines of a node and of those in it.
func moveDown(node *yaml.Node, lines int) {
	if lines == 0 {
		return
	}
	node.Line += lines
	for _, n := range node.Content {
		moveDown(n, lines)
	}
}
