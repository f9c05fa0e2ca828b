// Package moorv1 is the moorage API, generated from proto/moorage/v1, and the service config that goes with it.
//
//	connection, err := grpc.NewClient("127.0.0.1:50061",
//		grpc.WithTransportCredentials(insecure.NewCredentials()),
//		grpc.WithDefaultServiceConfig(moorv1.ServiceConfig))
//	scheduler := moorv1.NewSchedulerServiceClient(connection)
//
// Lack of capacity is an answer, [Decision_DECISION_HOLD], never an error. Errors carry google.rpc.ErrorInfo with the
// domain "moorage.v1" and a stable reason, BadRequest with the fields that were refused, and RetryInfo where a retry helps.
package moorv1

import _ "embed"

// ServiceConfig spreads calls over all servers that a name resolves to, and retries those that a server could not
// answer, no sooner than it asked for (grpc-retry-pushback-ms). Give every call that changes something a request_id,
// so that a retry gets the answer of the first try.
//
//go:embed service_config.json
var ServiceConfig string
