package redisscript

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// ServerError is the reason why a server could not be queried, or did not answer as it
// should.
type ServerError struct {
	server string
	reason string
	text   string
	err    error

	// Whether it suggests that the next call will fail too.
	counts bool
	// Whether it will last until somebody changes the config or the server.
	lasts bool
	// Whether only a reply that has written proves that it is over.
	writes bool
	// Whether the connection is of no more use, and idle ones are probably broken too.
	breaks bool
	// Whether the server is healthy, but not the right one.
	elsewhere bool
	// Whether it is certain that the script was not run, or has written nothing.
	notRun bool
}

func (f *ServerError) Error() string {
	text := "redis at " + f.server
	if f.text != "" {
		text += " " + f.text
	}
	return text + ": " + describe(f.err)
}

// describe returns the part of an error that may be shown: texts from this
// process, the operating system and TLS, and of a server's reply only the code.
// The rest may contain anything that was sent to the server, including the user
// and password.
func describe(err error) string {
	switch own := (credentialsError{}); {
	case errors.As(err, &own):
		return own.Error()
	case errors.Is(err, redis.Nil):
		return "no server has this master_name"
	}
	var reply redis.Error
	if errors.As(err, &reply) {
		word, _, _ := strings.Cut(reply.Error(), " ")
		_, known := replies[word]
		if word == "NOPERM" {
			for _, command := range commands {
				if strings.Contains(reply.Error(), "'"+command+"' command") {
					return word + " on " + command
				}
			}
		}
		switch {
		case known || slices.Contains(otherCodes, word):
			return word
		case word == "ERR":
			return "ERR, and more that is not shown, as it may name the user or password"
		}
		return "an error that is not shown, as it may name the user or password"
	}
	if texts := harmless(err, nil); len(texts) > 0 {
		return strings.Join(texts, ": ")
	}
	return "an error that is not shown, as it may quote what was sent"
}

// commands are the commands that a Redis or sentinel user needs permission for.
var commands = []string{
	"evalsha", "eval", "get", "set", "time", "select", "asking", "script|load", "cluster|slots", "hello", "ping", "subscribe",
	"sentinel|get-master-addr-by-name", "sentinel|sentinels", "sentinel|replicas",
}

// otherCodes are the codes of replies that have no special meaning here.
var otherCodes = []string{
	"CROSSSLOT", "DENIED", "EXECABORT", "NOPROTO", "NOSCRIPT", "NOTBUSY", "UNKILLABLE", "WRONGTYPE",
}

// corrupt is the error for something that a server holds, or has replied, that
// cannot come from the script. Its text is shown.
type corrupt struct{ error }

// credentialsError is the error of Options.Credentials. Its text is shown, whatever it wraps.
type credentialsError struct{ error }

// ownErrors are errors with known texts.
var ownErrors = []error{
	errReplyTooLarge, errReplyMalformed, errUnasked, errBehind, errLate, errKept, errConnecting, errNotConnected, errPlain,
	context.DeadlineExceeded, context.Canceled, os.ErrDeadlineExceeded, io.EOF, io.ErrUnexpectedEOF,
	net.ErrClosed, redis.ErrClosed, redis.ErrPoolTimeout,
}

// harmless appends the texts of the errors in err's tree that may be shown.
func harmless(err error, texts []string) []string {
	if slices.Contains(ownErrors, err) {
		return append(texts, err.Error())
	}
	switch err := err.(type) { // this function walks the tree
	case corrupt, *net.OpError, *net.DNSError, syscall.Errno, *os.SyscallError, *fs.PathError,
		tls.AlertError, tls.RecordHeaderError, *tls.CertificateVerificationError,
		x509.UnknownAuthorityError, x509.HostnameError, x509.CertificateInvalidError:
		return append(texts, err.Error())
	case interface{ Unwrap() error }:
		return harmless(err.Unwrap(), texts)
	case interface{ Unwrap() []error }:
		for _, one := range err.Unwrap() {
			texts = harmless(one, texts)
		}
		return texts
	case nil:
		return texts
	}
	// TLS handshake errors do not all have a type of their own.
	if text := err.Error(); strings.HasPrefix(text, "tls: ") || strings.HasPrefix(text, "remote error: tls: ") {
		return append(texts, text)
	}
	return texts
}

func (f *ServerError) Unwrap() error { return f.err }

// Reason returns the reason as one word.
func (f *ServerError) Reason() string { return f.reason }

// unused is the reason of a failure after the client was closed.
const unused = "unused"

var (
	// errBehind means that a call was not sent, because the answers to those before
	// it took too long.
	errBehind = errors.New("the calls before it were not answered in time")

	// errLate means that a call had less time than the timeout, and was not answered
	// within that.
	errLate = errors.New("too little time was left for an answer")

	// errKept means that a call was not answered in time because this process did not
	// go on to write it, or to read what had come.
	errKept = errors.New("this process was too busy to write the call or to read the answer")

	// errUnasked means that a server has sent something unasked, as some do before
	// they close a connection.
	errUnasked = errors.New("the server sent something unasked")

	// errDropped means that a connection was closed here, for a reason that was
	// recorded.
	errDropped = fmt.Errorf("the connection was given up: %w", net.ErrClosed)

	// errConnecting means that the first connection was not ready in time.
	errConnecting = errors.New("a connection was not made in time")

	// errNotConnected means that a server is down and there is no connection to it
	// yet.
	errNotConnected = errors.New("there is no connection yet")
)

// replies describes error replies by their first word.
var replies = map[string]ServerError{
	"OOM":         {reason: "oom", text: "is out of memory", counts: true, writes: true},
	"MISCONF":     {reason: "misconf", text: "can't save its data and takes no writes", counts: true, writes: true},
	"NOREPLICAS":  {reason: "noreplicas", text: "has too few replicas to take writes", counts: true, writes: true},
	"READONLY":    {reason: "readonly", text: "is a replica and takes no writes", counts: true, writes: true, breaks: true},
	"LOADING":     {reason: "loading", text: "is loading its data", counts: true},
	"BUSY":        {reason: "busy", text: "is busy with a script", counts: true},
	"MASTERDOWN":  {reason: "masterdown", text: "is a replica without a master", counts: true},
	"NOAUTH":      {reason: "noauth", text: "wants a password", counts: true, lasts: true, breaks: true}, // the next connection logs in again
	"WRONGPASS":   {reason: "wrongpass", text: "does not accept the user or password", counts: true, lasts: true},
	"NOPERM":      {reason: "noperm", text: "does not allow this user a command or key", counts: true, lasts: true, writes: true},
	"CLUSTERDOWN": {reason: "clusterdown", text: "serves no such slot, a part of its cluster is down"},
	"MOVED":       {reason: "moved", text: "is a server of a cluster, and another one has the key; add the option cluster if it is missing", elsewhere: true},
	"ASK":         {reason: "moved", text: "is a server of a cluster, and another one has the key; add the option cluster if it is missing", elsewhere: true},
	"CROSSSLOT":   {reason: "moved", text: "is a server of a cluster; add the option cluster", counts: true, lasts: true},
	"TRYAGAIN":    {reason: "tryagain", text: "is moving the slot to another server", elsewhere: true},
}

// replyTexts describes those that all begin with "ERR" by another part of their
// text.
var replyTexts = map[string]ServerError{
	"max number of clients":     {reason: "maxclients", text: "has too many clients", counts: true},
	"user executing the script": {reason: "noperm", text: "does not allow this user a command or key", counts: true, lasts: true, writes: true},
	"ACL failure in script":     {reason: "noperm", text: "does not allow this user a command or key", counts: true, lasts: true, writes: true},
	"DB index is out of range":  {reason: "db", text: "has no database of this number", counts: true, lasts: true},
	"cluster support disabled":  {reason: "unsupported", text: "is no cluster, which several addresses without master_name are for; use one address", counts: true, lasts: true},
	"SELECT is not allowed":     {reason: "db", text: "is a cluster's, which has only database 0", counts: true, lasts: true},
}

// newFailure converts err to a ServerError for callers that have waited for the
// timeout, or without a limit if that is 0.
func newFailure(server string, timeout time.Duration, err error) *ServerError {
	f := ServerError{reason: "error", counts: true}
	late := "did not answer in time"
	if timeout > 0 {
		late = fmt.Sprintf("did not answer within %v", timeout)
	}
	var reply redis.Error
	var netErr net.Error
	var dns *net.DNSError
	switch {
	case errors.As(err, new(corrupt)):
		f = ServerError{reason: "corrupt"}
	case errors.As(err, new(credentialsError)):
		f.reason, f.text = "credentials", "can't be logged in to"
	case errors.Is(err, redis.Nil): // nothing but sentinels replies that here
		f.reason, f.text, f.lasts = "nomaster", "is not known to them", true
	case errors.Is(err, errBehind), errors.Is(err, errLate), errors.Is(err, errKept):
		f = ServerError{reason: "backlog", text: late}
	case errors.Is(err, errReplyTooLarge), errors.Is(err, errReplyMalformed), errors.Is(err, errUnasked):
		f.reason, f.text = "reply", "sent what can't be a reply"
	case errors.Is(err, errNotConnected):
		f = ServerError{reason: "down", text: "is down"}
	case errors.As(err, &reply):
		word, text, _ := strings.Cut(reply.Error(), " ")
		if known, ok := replies[word]; ok {
			f = known
			// What concerns all commands, or all writes, stops a script before its first
			// write, but a right may lack to a command that follows one.
			f.notRun = word != "NOPERM" || !strings.Contains(text, "script: ")
			break
		}
		f.notRun = word == "NOSCRIPT"
		for text, known := range replyTexts {
			if strings.Contains(reply.Error(), text) {
				f = known
			}
		}
		if what := lacking(reply.Error()); what != "" && f.text == "" {
			f.reason, f.text = "unsupported", "can't be used: it lacks "+what
		}
	case errors.As(err, &dns):
		f.reason, f.text, f.lasts = "dns", "is not known by that name", dns.IsNotFound
	case errors.Is(err, errConnecting), errors.Is(err, context.DeadlineExceeded),
		errors.As(err, &netErr) && netErr.Timeout():
		f.reason, f.text = "timeout", late
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		f.reason, f.text, f.breaks = "refused", "can't be connected to", true
	case isTLS(err):
		f.reason, f.text, f.lasts = "tls", "can't be connected to by TLS", true
	case errors.Is(err, redis.ErrClosed):
		f = ServerError{reason: unused, text: "is no longer in use"}
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		f.reason, f.text, f.breaks = "closed", "closed the connection", true
	}
	f.server, f.err = server, err
	f.notRun = f.notRun || errors.Is(err, errBehind) || errors.Is(err, errNotConnected) || errors.Is(err, errConnecting)
	return &f
}

// newConnectFailure converts the error of making a connection to a ServerError. The next
// connection shows whether it is over.
func newConnectFailure(server string, err error) *ServerError {
	f := newFailure(server, 0, err)
	f.writes = false
	return f
}

// lacking returns what a server lacks that has replied such an error, or "". It names
// only what this package has sent, and none of what was in it.
func lacking(reply string) string {
	code, text, _ := strings.Cut(strings.ToLower(reply), " ")
	if code != "err" {
		return ""
	}
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(text, part) })
	}
	switch {
	case has("unknown redis command"):
		return "a command that the script calls"
	case has("unknown command", "unsupported command", "unknown or unsupported", "not support", "disabled", "not allowed"):
		for _, command := range commands {
			if has("'"+command+"'", "`"+command+"`", `"`+command+`"`, "command "+command) {
				return strings.ToUpper(command)
			}
		}
		if has("script", "lua") {
			return "scripts (EVAL), or they are disabled"
		}
		return "a command that is needed"
	case has("syntax error"):
		return "an option of a command that the script calls"
	case has("user_script", "running script", "compiling script"):
		return "something that the script uses"
	}
	return ""
}

// refusesCommand reports whether err is a server's reply to a command that it does not
// have, or does not allow: "ERR unknown command" and the like.
func refusesCommand(err error) bool {
	reply := redis.Error(nil)
	if !errors.As(err, &reply) {
		return false
	}
	word, text, _ := strings.Cut(reply.Error(), " ")
	return (word == "ERR" || word == "NOPERM") && strings.Contains(text, "command")
}

// isTLS reports whether err comes from a TLS handshake.
func isTLS(err error) bool {
	var alert tls.AlertError
	var record tls.RecordHeaderError
	var verify *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	return errors.As(err, &alert) || errors.As(err, &record) || errors.As(err, &verify) ||
		errors.As(err, &authority) || strings.Contains(err.Error(), "tls: ")
}
