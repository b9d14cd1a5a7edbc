package usage

import "bytes"

// events reads server-sent events, whose data are JSON texts.
type events struct {
	json  *scanner
	state eventState
	field [len(dataField)]byte // what was read of a field's name
	n     int                  // of field
	cr    bool                 // whether the last byte was a carriage return, which a line feed may follow
	data  bool                 // whether the event has data
	size  int64                // of all data
}

// eventState is what the next byte of events belongs to.
type eventState uint8

const (
	inField     eventState = iota // the beginning of a line
	beforeData                    // the space that may be before data
	inData                        // data, up to the end of the line
	inOtherLine                   // the rest of a line without data
)

const dataField = "data:"

// write reads more.
func (e *events) write(b []byte) {
	for skipped := false; len(b) > 0; {
		if !skipped && e.between() {
			skipped, b = true, e.skip(b)
			continue
		}
		if e.cr {
			if e.cr = false; b[0] == '\n' {
				b = b[1:]
				continue
			}
		}
		end := lineEnd(b)
		line := b[:end]
		for e.state == inField && len(line) > 0 {
			e.field[e.n], line = line[0], line[1:]
			if e.n++; e.n == len(dataField) {
				if e.state = inOtherLine; string(e.field[:]) == dataField {
					e.state, e.data = beforeData, true
				}
			}
		}
		if e.state == beforeData && len(line) > 0 {
			e.state, line = inData, bytes.TrimPrefix(line, []byte(" "))
		}
		if e.state == inData {
			e.size += int64(len(line))
			e.json.write(line)
		}
		if end == len(b) {
			return
		}
		e.endLine(e.state == inField && e.n == 0)
		e.cr = b[end] == '\r'
		b = b[end+1:]
	}
}

// between reports whether no event has begun, or none of its data.
func (e *events) between() bool { return e.state == inField && e.n == 0 && !e.data && !e.cr }

// skip skips the events that end in b, if none of them has any of the numbers, as most have none.
func (e *events) skip(b []byte) []byte {
	end := bytes.LastIndex(b, []byte("\n\n"))
	if end < 0 || e.json.plan.mayBeIn(b[:end]) {
		return b
	}
	for line := range bytes.Lines(b[:end]) {
		if data, ok := bytes.CutPrefix(bytes.TrimSuffix(line, []byte("\n")), []byte(dataField)); ok {
			e.size += int64(len(bytes.TrimPrefix(data, []byte(" "))))
		}
	}
	return b[end+2:]
}

// endLine ends a line. An empty one ends the event.
func (e *events) endLine(empty bool) {
	switch {
	case empty && e.data:
		e.data = false
		e.json.reset()
	case e.state == inData:
		e.json.write([]byte{'\n'}) // the next line goes on with the text
	}
	e.state, e.n = inField, 0
}

// lineEnd returns the index of the first end of a line in b, or its length.
func lineEnd(b []byte) int {
	if i := bytes.IndexByte(b, '\n'); i >= 0 {
		b = b[:i]
	}
	if i := bytes.IndexByte(b, '\r'); i >= 0 {
		return i
	}
	return len(b)
}
