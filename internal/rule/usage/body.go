package usage

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
)

// Body is the body of a response that is read as it passes by.
type Body struct {
	json   scanner
	events events
	form   form
	stream bool  // whether its type is that of events: other text may look like some
	single bool  // whether its type is that of one JSON text
	size   int64 // of what was read, decoded

	received atomic.Int64 // bytes, as they were sent
	whole    bool         // whether all was read that was received
	pipe     *io.PipeWriter
	decoded  chan struct{} // closed once the decoder has ended; nil if there is none
	why      string        // it can't be read; empty if it can
}

// form is how a body has numbers.
type form uint8

const (
	undecided form = iota // nothing but white space so far
	isJSON                // JSON texts, one or in lines
	isEvents              // server-sent events
	isText                // it can't have any
)

// binaryTypes are binary, though some contain JSON.
var binaryTypes = []string{
	"image/", "audio/", "video/", "font/", "multipart/", "application/grpc", "application/connect+",
	"application/vnd.amazon.eventstream", "application/octet-stream",
}

// NewBody returns the body of a response with the header h.
func (p *Plan) NewBody(h http.Header) *Body {
	b := &Body{json: newScanner(p)}
	b.events.json = &b.json
	kind := strings.ToLower(strings.TrimSpace(h.Get("Content-Type")))
	b.stream = strings.HasPrefix(kind, "text/event-stream")
	plain, _, _ := strings.Cut(kind, ";")
	b.single = strings.TrimSpace(plain) == "application/json"
	for _, prefix := range binaryTypes {
		if strings.HasPrefix(kind, prefix) {
			b.why = "bodies of type " + kind + " can't be read: " + remedyMatch
			return b
		}
	}
	codings := contentCodings(h)
	switch {
	case len(codings) == 0:
		b.whole = true
	case !canDecode(codings):
		b.why = "bodies encoded as " + strings.Join(codings, ", ") + ` can't be read: have the upstream use gzip, zstd or br, by "header_up Accept-Encoding gzip"`
	default:
		var r *io.PipeReader
		r, b.pipe = io.Pipe()
		b.decoded = make(chan struct{})
		go b.decode(r, codings)
	}
	return b
}

// Write reads more. It keeps nothing of p.
func (b *Body) Write(p []byte) {
	b.received.Add(int64(len(p)))
	switch {
	case b.decoded != nil:
		_, _ = b.pipe.Write(p)
	case b.why == "":
		b.read(p)
	}
}

// End must be called when nothing more comes, and before anything is asked about b.
func (b *Body) End() {
	if b.decoded != nil {
		_ = b.pipe.Close()
		<-b.decoded
	}
	b.events.end()
}

// read reads more of the decoded text. Which form it has is seen from its first character, as
// servers call events anything, and what they call events may be JSON.
func (b *Body) read(p []byte) {
	b.size += int64(len(p))
	for b.form == undecided && len(p) > 0 {
		switch c := p[0]; {
		case isSpace(c), c == 0xef, c == 0xbb, c == 0xbf: // or a byte order mark
			p = p[1:]
		case c == '{', c == '[':
			b.form, b.json.single = isJSON, b.single
		case b.stream, strings.IndexByte("deir:", c) >= 0: // data, event, id, retry, or a comment
			b.form = isEvents
		default:
			b.form = isText
		}
	}
	switch b.form {
	case isJSON:
		b.json.write(p)
	case isEvents:
		b.events.write(p)
	case undecided, isText:
	}
}

// Whole reports whether all was read that came. If not, there may be other numbers in the rest.
func (b *Body) Whole() bool { return b.whole }

// SaysEnd reports whether the last text that came says that nothing comes behind it. Whoever closes
// the connection then has not left early, and what may be missing of a compressed body is no text.
func (b *Body) SaysEnd() bool { return b.json.whole }

// bytesPerToken is how many bytes of text a token has about.
const bytesPerToken = 4

// Estimate returns how many tokens b may have cost if it does not say it, whose request had a
// body of some length, or -1.
func (b *Body) Estimate(request int64) int64 {
	size := b.size
	switch {
	case !b.whole:
		size = max(size, b.received.Load())
	case b.form == isEvents && b.stream:
		size = b.events.size
	}
	return Estimate(max(request, 0) + size)
}

// Estimate returns how many tokens a text of some length may have. It is 0 if that is unknown.
func Estimate(length int64) int64 { return max(length, 0) / bytesPerToken }

// Remedies of responses that do not say what they cost.
const (
	remedyMatch = "limit only requests whose responses say it, such as with \"match path /v1/chat/completions\""

	RemedyUpgrade = "messages of websockets and other upgraded connections can't be read: " + remedyMatch
)

// Remedy returns why b does not say what it cost, and what to do.
func (b *Body) Remedy() string {
	switch {
	case b.why != "":
		return b.why
	case !b.whole:
		return "the body could not be decoded: have the upstream not compress it, by \"header_up -Accept-Encoding\""
	case b.form == isEvents:
		return `no event has the number: streams of OpenAI and compatible APIs need "stream_options": {"include_usage": true} in the request`
	case b.form == isJSON:
		return "the body has no such number: use json and the path where the API has it, or " + remedyMatch
	}
	return "the body is no JSON: " + remedyMatch
}
