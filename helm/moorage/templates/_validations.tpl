{{/* What the schema can not say. Every message begins with the value that is wrong. */}}

{{- define "moorage.validate" -}}
{{- include "moorage.validateRedis" . -}}
{{- include "moorage.validateCallers" . -}}
{{- range $key := list "listen" "insecure_listen" "redis" "metrics" "tls" "auth" -}}
{{- if hasKey $.Values.config $key -}}
{{- fail (printf "config.%s: the chart sets it, from %s" $key (ternary "service.port" (printf "the value %s" $key) (eq $key "listen"))) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict .Values.config.health) "listen" -}}
{{- fail "config.health.listen: the chart sets it, from health.port" -}}
{{- end -}}
{{- with .Values.terminationGracePeriodSeconds -}}
{{- $least := include "moorage.stopSeconds" $ | int -}}
{{- if le (int .) $least -}}
{{- fail (printf "terminationGracePeriodSeconds is %v: must be above %d, which preStopSleepSeconds and config.shutdown take" . $least) -}}
{{- end -}}
{{- end -}}
{{- with .Values.podDisruptionBudget -}}
{{- if and .enabled (eq (kindIs "invalid" .minAvailable) (kindIs "invalid" .maxUnavailable)) -}}
{{- fail "podDisruptionBudget.minAvailable: set it or podDisruptionBudget.maxUnavailable, and the other to null" -}}
{{- end -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %v: must not be above autoscaling.maxReplicas, which is %v" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- $ports := list .Values.service.port .Values.health.port -}}
{{- if .Values.metrics.enabled }}{{ $ports = append $ports .Values.metrics.port }}{{ end -}}
{{- if ne (len (uniq $ports)) (len $ports) -}}
{{- fail (printf "health.port: service.port, health.port and metrics.port must differ, got %v" $ports) -}}
{{- end -}}
{{- end -}}

{{- define "moorage.validateRedis" -}}
{{- if eq .Values.redis.mode "embedded" -}}
{{- $why := "redis.mode=embedded keeps the ledger inside one process, and two would admit twice: use redis.mode=external" -}}
{{- if .Values.autoscaling.enabled -}}{{- fail (printf "autoscaling.enabled is true: %s" $why) -}}{{- end -}}
{{- if gt (int .Values.replicaCount) 1 -}}{{- fail (printf "replicaCount is %v: %s" .Values.replicaCount $why) -}}{{- end -}}
{{- end -}}
{{- if eq .Values.redis.mode "external" -}}
{{- with .Values.redis.external -}}
{{- if not (or .url .urlKey .sentinel.addresses) -}}
{{- fail "redis.external.url is empty: redis.mode=external needs it, or urlKey of existingSecret, or sentinel.addresses" -}}
{{- end -}}
{{- if and (or .urlKey .passwordKey) (not .existingSecret) -}}
{{- fail "redis.external.existingSecret is empty: urlKey and passwordKey name keys of it" -}}
{{- end -}}
{{- if and .existingSecret (eq (empty .urlKey) (empty .passwordKey)) -}}
{{- fail "redis.external.urlKey: with existingSecret, set it or passwordKey, not both" -}}
{{- end -}}
{{- if and .urlKey .url -}}{{- fail "redis.external.url: leave it empty where urlKey names the whole URL" -}}{{- end -}}
{{- $shown := .url | replace "$(REDIS_PASSWORD)" "" -}}
{{- if regexMatch "://[^@]*:[^@]+@|[?&]password=" $shown -}}
{{- fail "redis.external.url: holds a password, which belongs into existingSecret; write $(REDIS_PASSWORD) in its place" -}}
{{- end -}}
{{- if ne (contains "$(REDIS_PASSWORD)" .url) (not (empty .passwordKey)) -}}
{{- fail "redis.external.passwordKey: goes together with $(REDIS_PASSWORD) in redis.external.url" -}}
{{- end -}}
{{- if ne (empty .sentinel.addresses) (empty .sentinel.masterName) -}}
{{- fail "redis.external.sentinel.masterName: goes together with redis.external.sentinel.addresses" -}}
{{- end -}}
{{- if and .cluster .sentinel.addresses -}}
{{- fail "redis.external.cluster is true: excludes redis.external.sentinel.addresses" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "moorage.validateCallers" -}}
{{- if not (or .Values.auth.allowAnonymous (include "moorage.asksWho" .)) -}}
{{- fail "auth.allowAnonymous is false: needs auth.existingSecret or tls.clientCaSecret" -}}
{{- end -}}
{{- if and .Values.tls.clientCaSecret (not .Values.tls.existingSecret) -}}
{{- fail "tls.existingSecret is empty: tls.clientCaSecret needs a server certificate" -}}
{{- end -}}
{{- if or .Values.tests.enabled .Values.collector.engines -}}
{{- if and .Values.tls.clientCaSecret (not .Values.client.certSecret) -}}
{{- fail "client.certSecret is empty: with tls.clientCaSecret, collectors and `helm test` (tests.enabled) must show a certificate" -}}
{{- end -}}
{{- if and .Values.auth.existingSecret (not .Values.client.tokenSecret) -}}
{{- fail "client.tokenSecret is empty: with auth.existingSecret, collectors and `helm test` (tests.enabled) must show a token" -}}
{{- end -}}
{{- end -}}
{{- range $name, $collector := .Values.collector.engines -}}
{{- $selector := dig "kubernetes" "selector" "" $collector -}}
{{- if not (or (get $collector "urls") (get $collector "dns") $selector) -}}
{{- fail (printf "collector.engines.%s: needs urls, dns or kubernetes.selector" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
