/** How calls are retried, in gRPC's own format: client/moorage/service_config.json. */
export const serviceConfig = {
  "loadBalancingConfig": [{ "round_robin": {} }],
  "retryThrottling": { "maxTokens": 1000, "tokenRatio": 1 },
  "methodConfig": [
    {
      "name": [
        { "service": "moorage.v1.SchedulerService" },
        { "service": "moorage.v1.InspectorService" },
        { "service": "moorage.v1.OperatorService" }
      ],
      "retryPolicy": {
        "maxAttempts": 5,
        "initialBackoff": "0.2s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"]
      }
    }
  ]
};
