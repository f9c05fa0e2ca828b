package main

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	moorv1 "moorage.dev/gen/moorage/v1"
)

// Dial opens a connection that retries what a server could not answer, no sooner than it asked for.
func Dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(moorv1.ServiceConfig))
}

// call makes a call with a deadline: without one it may stay open for ever.
func call[Request, Response any](
	ctx context.Context,
	method func(context.Context, *Request, ...grpc.CallOption) (*Response, error),
	request *Request,
) (*Response, error) {
	ctx, cancel := context.WithTimeout(ctx, maxWait+answerTime)
	defer cancel()
	return method(ctx, request)
}

// describe tells all that an error holds: its code, the stable reason, the fields that were refused, when to try again.
func describe(err error) string {
	s, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	lines := []string{fmt.Sprintf("%s: %s", s.Code(), s.Message())}
	for _, detail := range s.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			lines = append(lines, fmt.Sprintf("reason %s %v", detail.GetReason(), detail.GetMetadata()))
		case *errdetails.BadRequest:
			for _, violation := range detail.GetFieldViolations() {
				lines = append(lines, fmt.Sprintf("field %s %s", violation.GetField(), violation.GetDescription()))
			}
		case *errdetails.RetryInfo:
			lines = append(lines, fmt.Sprintf("try again in %s", detail.GetRetryDelay().AsDuration()))
		}
	}
	return strings.Join(lines, "; ")
}
