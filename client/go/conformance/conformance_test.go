// Package conformance plays the cases of proto/conformance with the Go stubs; the format is described in the README
// there.
package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "moorage.dev/gen/moorage/v1"
)

const (
	deadline = 30 * time.Second
	pause    = 100 * time.Millisecond
)

type testCase struct {
	Name   string
	Server string
	Steps  []step
}

type step struct {
	Call    string
	Request any
	Expect  expectation
	Save    map[string]string
	Within  float64
}

type expectation struct {
	Code      string
	Reason    string
	Field     string
	RetryInfo bool `json:"retry_info"`
	Response  any
	Present   []string
	Absent    []string
}

// answer is what came back from a call: the response as JSON, or the details of the error.
type answer struct {
	code     string
	response any
	info     *errdetails.ErrorInfo
	fields   []string
	retry    time.Duration
}

func TestConformance(t *testing.T) {
	if os.Getenv("MOORAGE_SERVER") == "" {
		t.Skip("MOORAGE_SERVER names no server")
	}
	connections := map[string]*grpc.ClientConn{}
	for _, variable := range []string{"MOORAGE_SERVER", "MOORAGE_SERVER_STORE_DOWN"} {
		if address := os.Getenv(variable); address != "" {
			connections[variable] = connect(t, address)
		}
	}
	for _, c := range load(t) {
		if c.Server == "" {
			c.Server = "MOORAGE_SERVER"
		}
		connection, named := connections[c.Server]
		if !named {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			p := player{connection, map[string]string{"pool": "conformance-" + uuid.NewString()}}
			for n, s := range c.Steps {
				if problems := p.play(t, s); len(problems) > 0 {
					t.Fatalf("step %d, %s: %s", n+1, s.Call, strings.Join(problems, "; "))
				}
			}
		})
	}
}

func connect(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableRetry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = connection.Close() })
	return connection
}

func load(t *testing.T) []testCase {
	t.Helper()
	path := os.Getenv("MOORAGE_CONFORMANCE")
	if path == "" {
		path = "../../../proto/conformance/cases.json"
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var cases []testCase
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	return cases
}

// player plays one case.
type player struct {
	connection *grpc.ClientConn
	variables  map[string]string
}

// play makes the call until the answer is as expected or its time is over, and returns what is wrong with the last one.
func (p player) play(t *testing.T, s step) []string {
	t.Helper()
	until := time.Now().Add(time.Duration(s.Within * float64(time.Second)))
	for {
		got := p.call(t, s.Call, p.filled(s.Request))
		expect := s.Expect
		expect.Response = p.filled(expect.Response)
		problems := expect.problems(got)
		if len(problems) == 0 {
			for name, path := range s.Save {
				p.variables[name] = at(got.response, path).(string)
			}
			return nil
		}
		if !time.Now().Before(until) {
			return append(problems, fmt.Sprintf("answer: %+v", got))
		}
		time.Sleep(pause)
	}
}

func (p player) call(t *testing.T, call string, body any) answer {
	t.Helper()
	service, name, _ := strings.Cut(call, "/")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("moorage.v1." + service + "." + name))
	if err != nil {
		t.Fatal(err)
	}
	method := found.(protoreflect.MethodDescriptor)
	request, response := message(t, method.Input()), message(t, method.Output())
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	if err := protojson.Unmarshal(text, request); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	if err := p.connection.Invoke(ctx, "/moorage.v1."+call, request, response); err != nil {
		return failure(err)
	}
	return answer{code: "OK", response: asJSON(t, response)}
}

func message(t *testing.T, descriptor protoreflect.MessageDescriptor) proto.Message {
	t.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName(descriptor.FullName())
	if err != nil {
		t.Fatal(err)
	}
	return kind.New().Interface()
}

func asJSON(t *testing.T, m proto.Message) (value any) {
	t.Helper()
	text, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	return value
}

// failure reads the details of an error.
func failure(err error) answer {
	s := status.Convert(err)
	got := answer{code: codeName(s)}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			got.info = detail
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				got.fields = append(got.fields, violation.GetField())
			}
		case *errdetails.RetryInfo:
			got.retry = detail.GetRetryDelay().AsDuration()
		}
	}
	return got
}

var capital = regexp.MustCompile(`(.)([A-Z])`)

// codeName turns InvalidArgument, as Go has it, into INVALID_ARGUMENT, as all others do.
func codeName(s *status.Status) string {
	return strings.ToUpper(capital.ReplaceAllString(s.Code().String(), "${1}_${2}"))
}

var variable = regexp.MustCompile(`\$\{\w+\}`)

// filled returns the value with all variables replaced.
func (p player) filled(value any) any {
	switch value := value.(type) {
	case string:
		return variable.ReplaceAllStringFunc(value, func(found string) string { return p.value(found[2 : len(found)-1]) })
	case []any:
		list := make([]any, len(value))
		for n, item := range value {
			list[n] = p.filled(item)
		}
		return list
	case map[string]any:
		object := make(map[string]any, len(value))
		for key, item := range value {
			object[key] = p.filled(item)
		}
		return object
	}
	return value
}

func (p player) value(name string) string {
	if name == "uuid" {
		return uuid.NewString()
	}
	if _, known := p.variables[name]; !known && strings.HasPrefix(name, "uuid_") {
		p.variables[name] = uuid.NewString()
	}
	return p.variables[name]
}

// problems lists what is not as expected.
func (e expectation) problems(got answer) []string {
	var bad []string
	need := func(what string, wanted, got any) {
		if wanted != got {
			bad = append(bad, fmt.Sprintf("%s is %q, not %q", what, got, wanted))
		}
	}
	if e.Code == "" {
		e.Code = "OK"
	}
	need("code", e.Code, got.code)
	if e.Reason != "" {
		need("reason", e.Reason, got.info.GetReason())
		need("domain", "moorage.v1", got.info.GetDomain())
	}
	if e.Field != "" && !slices.Contains(got.fields, e.Field) {
		bad = append(bad, fmt.Sprintf("%q is not among the violated fields %q", e.Field, got.fields))
	}
	if e.RetryInfo && got.retry <= 0 {
		bad = append(bad, "no RetryInfo with a delay")
	}
	if e.Response != nil {
		bad = append(bad, mismatches("response", e.Response, got.response)...)
	}
	for _, path := range e.Present {
		if at(got.response, path) == nil {
			bad = append(bad, path+" is missing")
		}
	}
	for _, path := range e.Absent {
		if found := at(got.response, path); found != nil {
			bad = append(bad, fmt.Sprintf("%s is there: %v", path, found))
		}
	}
	return bad
}

// mismatches tells where got does not hold what is wanted of it.
func mismatches(path string, wanted, got any) (bad []string) {
	switch wanted := wanted.(type) {
	case map[string]any:
		if object, ok := got.(map[string]any); ok {
			for key, item := range wanted {
				bad = append(bad, mismatches(path+"."+key, item, object[key])...)
			}
			return bad
		}
	case []any:
		if list, ok := got.([]any); ok && len(list) == len(wanted) {
			for n, item := range wanted {
				bad = append(bad, mismatches(path+"."+strconv.Itoa(n), item, list[n])...)
			}
			return bad
		}
	default:
		isDefault := wanted == false || wanted == 0.0 || wanted == "0" || wanted == ""
		if reflect.DeepEqual(wanted, got) || got == nil && isDefault {
			return nil
		}
	}
	return []string{fmt.Sprintf("%s is %v, not %v", path, got, wanted)}
}

// at returns the value at a path, nil where there is none.
func at(value any, path string) any {
	for name := range strings.SplitSeq(path, ".") {
		switch inside := value.(type) {
		case map[string]any:
			value = inside[name]
		case []any:
			n, err := strconv.Atoi(name)
			if err != nil || n >= len(inside) {
				return nil
			}
			value = inside[n]
		default:
			return nil
		}
	}
	return value
}
