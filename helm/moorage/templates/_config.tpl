{{/*
What the server reads. This file is the one place that knows the server's keys and variables: the configuration file
(moorage.config), the variables that carry secrets (moorage.serverEnv), and the files both name (moorage.server*).
*/}}

{{- define "moorage.config" -}}
{{- $managed := dict
  "listen" (printf "0.0.0.0:%v" .Values.service.port)
  "redis" (include "moorage.redisConfig" . | fromYaml)
  "health" (dict "listen" (printf "0.0.0.0:%v" .Values.health.port))
-}}
{{- if .Values.metrics.enabled -}}
{{- $_ := set $managed "metrics" (dict "listen" (printf "0.0.0.0:%v" .Values.metrics.port)) -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $tls := dict "cert_file" "/etc/moorage/tls/tls.crt" "key_file" "/etc/moorage/tls/tls.key" -}}
{{- if .Values.tls.clientCaSecret -}}
{{- $_ := set $tls "client_ca_file" "/etc/moorage/client-ca/ca.crt" -}}
{{- end -}}
{{- $_ := set $managed "tls" $tls -}}
{{- end -}}
{{- if .Values.auth.existingSecret -}}
{{- $_ := set $managed "auth" (dict "tokens_file" "/etc/moorage/auth/tokens.yaml") -}}
{{- end -}}
{{- if not (include "moorage.asksWho" .) -}}
{{- $_ := set $managed "insecure_listen" true -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $managed) -}}
{{- end -}}

{{/* True where the server asks its callers who they are. */}}
{{- define "moorage.asksWho" -}}
{{- if or .Values.auth.existingSecret .Values.tls.clientCaSecret -}}true{{- end -}}
{{- end -}}

{{- define "moorage.redisConfig" -}}
{{- $external := .Values.redis.external -}}
key_prefix: {{ .Values.redis.keyPrefix | quote }}
{{- if eq .Values.redis.mode "embedded" }}
embedded: true
{{- else if eq .Values.redis.mode "bundled" }}
url: redis://{{ include "moorage.fullname" . }}-redis:6379/0
{{- else }}
{{- if not (include "moorage.redisUrlIsSecret" .) }}
{{- with $external.url }}
url: {{ . | quote }}
{{- end }}
{{- end }}
{{- with $external.sentinel.addresses }}
sentinels: {{ toJson . }}
master_name: {{ $external.sentinel.masterName | quote }}
{{- end }}
{{- if $external.cluster }}
cluster: true
{{- end }}
{{- end }}
{{- end -}}

{{/* True where the URL comes, or part of it, from a Secret: then it is a variable and in no file. */}}
{{- define "moorage.redisUrlIsSecret" -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.existingSecret -}}true{{- end -}}
{{- end -}}

{{- define "moorage.serverEnv" -}}
{{- with .Values.redis.external }}
{{- if include "moorage.redisUrlIsSecret" $ }}
{{- if .urlKey }}
- name: MOORAGE_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .urlKey | quote }}}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .passwordKey | quote }}}
# Kubernetes puts the password in when the container starts.
- name: MOORAGE_REDIS_URL
  value: {{ .url | quote }}
{{- end }}
{{- end }}
{{- if and (eq $.Values.redis.mode "external") .caSecret }}
# The server opens TLS connections to Redis only.
- name: SSL_CERT_FILE
  value: /etc/moorage/redis-ca/ca.crt
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Secrets that become files in /etc/moorage/DIRECTORY: a list of {directory, secret, files: {FILE: KEY}}. */}}
{{- define "moorage.serverSecrets" -}}
{{- with .Values.tls.existingSecret }}
- {directory: tls, secret: {{ quote . }}, files: {tls.crt: tls.crt, tls.key: tls.key}}
{{- end }}
{{- with .Values.tls.clientCaSecret }}
- {directory: client-ca, secret: {{ quote . }}, files: {ca.crt: {{ quote $.Values.tls.clientCaKey }}}}
{{- end }}
{{- with .Values.auth.existingSecret }}
- {directory: auth, secret: {{ quote . }}, files: {tokens.yaml: {{ quote $.Values.auth.key }}}}
{{- end }}
{{- if eq .Values.redis.mode "external" }}
{{- with .Values.redis.external.caSecret }}
- {directory: redis-ca, secret: {{ quote . }}, files: {ca.crt: {{ quote $.Values.redis.external.caKey }}}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "moorage.secretMounts" -}}
{{- range fromYamlArray . }}
- {name: {{ .directory }}, mountPath: /etc/moorage/{{ .directory }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "moorage.secretVolumes" -}}
{{- range fromYamlArray . }}
- name: {{ .directory }}
  secret:
    secretName: {{ .secret | quote }}
    items:
      {{- range $file, $key := .files }}
      - {key: {{ $key | quote }}, path: {{ $file | quote }}}
      {{- end }}
{{- end }}
{{- end -}}
